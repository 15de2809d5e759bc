"""The order of a pairing, for either side, over an open line."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from kvpack.errors import KvpackError
from node.config import Address
from node.credentials import PinnedPeer
from node.errors import PairError, PairRefusedError
from node.pair import agreement as agree
from node.pair.agreement import Agreement, Box, Share
from node.pair.console import Console
from node.pair.line import Deadline, SealedLine, accept_one, connect, listen
from node.pair.messages import (
    Kind,
    decode_grant,
    decode_offer,
    encode_grant,
    encode_offer,
    encode_word,
    expect_word,
)
from node.pair.party import Deal, Party, Wish, prepare, settle
from node.pair.writing import writing

_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Paired:
    """How a pairing ended well.

    Attributes:
        peer: Who is pinned here now.
        heard: Whether the other side said that it is done, too.
    """

    peer: PinnedPeer
    heard: bool


def listen_and_pair(wish: Wish, address: Address, seconds: float, console: Console) -> Paired:
    """Wait for the other side, and pair with the first that connects.

    Raises:
        KvpackError: Not paired, and nothing was kept.
    """
    party, deadline = prepare(wish), Deadline(seconds)
    server = listen(address)
    port = server.getsockname()[1]
    console.show(f"listening on {Address(address.host, port)} for one other side")
    if address.host not in _LOOPBACK:
        console.show("reachable from the network; what proves the other side is the code")
    with accept_one(server, deadline) as line:
        share = Share.draw()
        first = line.receive(agree.FIRST_BYTES)
        agree.check_magic(first)
        second = agree.second_message(share)
        line.send(second)
        third = line.receive(agree.THIRD_BYTES)
        agreed = agree.agree(share, first, second, third, joiner=False)
        sealed = SealedLine(line, Box(agreed.to_joiner), Box(agreed.to_listener))
        return _pair(party, sealed, agreed, console, joiner=False)


def join_and_pair(wish: Wish, address: Address, seconds: float, console: Console) -> Paired:
    """Connect to a listener, and pair with it.

    Raises:
        KvpackError: Not paired, and nothing was kept.
    """
    party, deadline = prepare(wish), Deadline(seconds)
    with connect(address, deadline) as line:
        share = Share.draw()
        first = agree.first_message(share)
        line.send(first)
        second = line.receive(agree.SECOND_BYTES)
        agree.check_magic(second)
        third = agree.third_message(share)
        line.send(third)
        agreed = agree.agree(share, first, second, third, joiner=True)
        sealed = SealedLine(line, Box(agreed.to_listener), Box(agreed.to_joiner))
        return _pair(party, sealed, agreed, console, joiner=True)


def _pair(
    party: Party, sealed: SealedLine, agreed: Agreement, console: Console, *, joiner: bool
) -> Paired:
    try:
        deal = _exchange_offers(party, sealed, agreed, joiner=joiner)
        _ask(deal, sealed, agreed, console)
        sealed.send(encode_word(Kind.YES))
        expect_word(sealed.receive(), Kind.YES)
        return _carry_out(deal, sealed, joiner=joiner)
    except KvpackError:
        # So that the other terminal says at once that it was stopped here. It may be gone already.
        with contextlib.suppress(PairError):
            sealed.send(encode_word(Kind.NO))
        raise


def _exchange_offers(party: Party, sealed: SealedLine, agreed: Agreement, *, joiner: bool) -> Deal:
    mine = encode_offer(party.offer(agreed, joiner=joiner))
    if joiner:
        sealed.send(mine)
    deal = settle(party, decode_offer(sealed.receive()), agreed, joiner=joiner)
    if not joiner:
        sealed.send(mine)
    return deal


def _ask(deal: Deal, sealed: SealedLine, agreed: Agreement, console: Console) -> None:
    for line in deal.describe():
        console.show(line)
    console.show(f"code         {agreed.code}")
    if not console.confirm("Does the other terminal show the same code?", sealed):
        raise PairRefusedError("stopped: the codes were not confirmed; nothing was kept")
    question = deal.key_question()
    if question is not None and not console.confirm(question, sealed):
        raise PairRefusedError("stopped: the tenant key was not confirmed; nothing was kept")


def _carry_out(deal: Deal, sealed: SealedLine, *, joiner: bool) -> Paired:
    """Both people agreed. The joiner writes first; whoever does not hear the other one undoes.

    One message can always be the last one that was lost. Here it is the listener's: then the
    listener has pinned a key that was removed again, which lets nobody in.
    """
    sealed.send(encode_grant(deal.grant()))
    files = deal.files(decode_grant(sealed.receive()))
    done = encode_word(Kind.DONE)
    if joiner:
        with writing(files):
            deal.check_written()
            sealed.send(done)
            expect_word(sealed.receive(), Kind.DONE)
        with contextlib.suppress(PairError):
            sealed.send(done)
        return Paired(deal.peer, heard=True)
    expect_word(sealed.receive(), Kind.DONE)
    with writing(files):
        deal.check_written()
        sealed.send(done)
    try:
        expect_word(sealed.receive(), Kind.DONE)
    except PairError:
        return Paired(deal.peer, heard=False)
    return Paired(deal.peer, heard=True)
