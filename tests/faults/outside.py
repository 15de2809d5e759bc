"""What must hold after a run, looked at from outside: the directory, the nodes' answers, the disks.

Nothing here asks a node whether it did well.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvpack.errors import KvpackError
from node.directory import Ownership, Record, open_directory
from node.errors import PeerAnswerError

from .conversation import Conversation, WrongBits
from .lab import TRANSFER_LEASE_S, Lab, NodeProcess

#: How long a session may be served by nobody once nothing fails any more.
SETTLE_S = 25.0

#: Further tokens that are compared with the twin's.
REPLAY_TOKENS = 5

#: The node of the session that says so has not got its state, and will not get it by itself.
GONE = frozenset({"session_not_found"})


@dataclass
class Findings:
    """What did not hold, by kind."""

    lost: list[str] = field(default_factory=list)
    owned_twice: list[str] = field(default_factory=list)
    wrong_bits: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        kinds = vars(self).items()
        return [f"{kind}: {text}" for kind, texts in kinds for text in texts]


async def record_of(lab: Lab, session_id: str) -> Record | None:
    """The directory's own entry."""
    directory = open_directory(f"sqlite:{lab.directory}")
    try:
        return await directory.owner(session_id)
    finally:
        await directory.close()


async def find_server(lab: Lab, nodes: list[NodeProcess], talk: Conversation) -> NodeProcess | None:
    """The one node that the directory names, once it serves; None: it has lost the state.

    Raises:
        TimeoutError: It does neither within ``SETTLE_S``.
    """
    end, gone = time.monotonic() + SETTLE_S, 0
    why = "no owner"
    while time.monotonic() < end:
        record = await record_of(lab, talk.session_id)
        if not isinstance(record, Ownership):
            return None
        owner = next(node for node in nodes if node.name == record.node)
        try:
            await talk.take(owner, REPLAY_TOKENS)
        except PeerAnswerError as error:
            why, gone = str(error), gone + 1 if error.peer_reason in GONE else 0
        except KvpackError as error:
            why, gone = str(error), 0
        else:
            return owner
        if gone >= 3:
            return None
        await asyncio.sleep(0.15)
    raise TimeoutError(f"nobody serves {talk.session_id}: {why}")


async def check_one_owner(
    lab: Lab, nodes: list[NodeProcess], talk: Conversation, found: Findings
) -> None:
    """Only the directory's owner serves, and only under the directory's token."""
    record = await record_of(lab, talk.session_id)
    if not isinstance(record, Ownership):
        found.other.append(f"{talk.session_id} has no owner")
        return
    for node in nodes:
        for token in {record.token, *talk.older}:
            try:
                word = await talk.refused(node, token)
            except KvpackError as error:
                found.other.append(f"node {node.name} does not answer: {error}")
                continue
            is_right = node.name == record.node and token == record.token
            if not word and not is_right:
                found.owned_twice.append(
                    f"{talk.session_id}: {node.name} serves under revision {token.revision}; "
                    f"the directory says {record.node} by {record.token.revision}"
                )
            if word and is_right:
                found.other.append(f"{talk.session_id}: its owner {node.name} refuses: {word}")


async def check_release(
    lab: Lab, giving: NodeProcess, since: int, talk: Conversation, found: Findings
) -> None:
    """A source that let go of its session did so because another owned it.

    Args:
        since: How many points the giving end had reached before the run.
    """
    if "source.release.before" not in giving.reached()[since:]:
        return
    record = await record_of(lab, talk.session_id)
    if not isinstance(record, Ownership) or record.node == giving.name:
        found.released.append(f"{giving.name} released {talk.session_id}; the directory: {record}")


async def check_bits(node: NodeProcess, talk: Conversation, found: Findings) -> None:
    """The next tokens, and the logits that they are chosen from, are the twin's."""
    try:
        compared = await talk.take(node, REPLAY_TOKENS)
    except WrongBits as error:
        found.wrong_bits.append(str(error))
    except KvpackError as error:
        found.other.append(f"replay on {node.name}: {error}")
    else:
        if compared < 1:
            found.other.append(f"replay on {node.name}: no logits came")


async def check_disks(lab: Lab, nodes: list[NodeProcess], found: Findings) -> None:
    """Once the transfers' leases are over, nothing is left that belongs to nothing."""
    end = time.monotonic() + 1.25 * TRANSFER_LEASE_S + 6.0
    while True:
        left = {node.name: lab.leftovers(node.name) for node in nodes}
        if not any(left.values()):
            return
        if time.monotonic() > end:
            found.leftovers.append(str(left))
            return
        await asyncio.sleep(0.1)
