"""Who may give this node what, and what of it is here already: all that a Prepare is asked.

Functions of one offer and of what this node is. They change nothing but the directory's claim of a
copy; the transfer itself is :mod:`node.migration.target`'s.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvpack.bundle import parse_token_ids
from kvpack.chunk import ChunkClass, open_chunk
from kvpack.errors import KvpackError
from kvpack.identity import require_same_identity
from node.binding import PackBinding
from node.directory import Ownership, OwnershipToken
from node.engine_thread import EngineThread
from node.errors import (
    ConsentError,
    DirectoryAmbiguousError,
    DirectoryError,
    InventoryError,
    PeerRefusedError,
    ReplayError,
    StaleTokenError,
    TransferStateError,
)
from node.migration.held import HeldFile, HeldObjects, NothingHeld
from node.migration.journal import Entry, Journal, TransferKey
from node.migration.messages import Offer, read_offer
from node.migration.spool import NoSpool, Pack, Spool, left_over
from node.migration.versions import OURS, Minors, Speaker, here
from node.pb.v1 import migration_pb2 as pb
from node.sessions import Sessions
from node.tier import Tier
from node.transient import Guests, is_transient

log = logging.getLogger(__name__)

#: A transfer without any progress for so long is given up, and its memory with it.
LEASE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """What every transfer into one node needs.

    ``spools`` is False only where what arrives may be lost with a restart, as in a measurement.
    Without a ``tier`` nothing is held but what an interrupted transfer left. ``guests`` are the
    sessions that remote prefills wait for, ``speaks`` the versions of the protocol.
    """

    sessions: Sessions
    engine: EngineThread
    binding: PackBinding
    journal: Journal
    spool_dir: Path
    lease_s: float = LEASE_S
    spools: bool = True
    tier: Tier | None = None
    guests: Guests = field(default_factory=Guests)
    speaks: Minors = OURS

    @property
    def speaker(self) -> Speaker:
        """This end, as refusals name it."""
        return here(self.sessions.node, self.speaks)

    def new_pack(self, path: Path, header_bytes: bytes) -> Pack:
        """Where the objects of one transfer go."""
        return Spool(path, self.binding.key, header_bytes) if self.spools else NoSpool()

    def keeps(self, session_id: str) -> bool:
        """Whether what arrives of a session is written down: a remote prefill can be had anew."""
        return self.spools and not is_transient(session_id)

    def pack_of(self, session_id: str, path: Path, header_bytes: bytes) -> Pack:
        """Where the objects of that session's transfer go."""
        return NoSpool() if is_transient(session_id) else self.new_pack(path, header_bytes)


def check_kind(target: Target, offer: Offer) -> None:
    """Refuse another tenant, model or key epoch, and other numerics without consent.

    Raises:
        PeerRefusedError: Another tenant's.
        IdentityMismatchError: Another model or tokenizer; also LayoutMismatchError.
        ReplayError: Another key epoch.
        ConsentError: The numerics differ and nobody consented.
    """
    binding = target.binding
    if offer.header.identity.tenant != binding.identity.tenant:
        # Whose node this is concerns nobody of another tenant: the wire says no more than that.
        raise PeerRefusedError(
            f"{offer.key.source}: a transfer of tenant {offer.header.identity.tenant!r}, "
            f"this node holds {binding.identity.tenant!r}"
        )
    require_same_identity(binding.identity, offer.header.identity)
    if offer.header.epoch != binding.key.epoch:
        raise ReplayError(
            f"key epoch {offer.header.epoch}: this node is in epoch {binding.key.epoch}"
        )
    difference = binding.numerics.first_difference(offer.numerics)
    if difference is not None and not offer.accept_compatible:
        name, ours, theirs = difference
        raise ConsentError(
            f"numerics.{name}: expected {ours}, found {theirs}; "
            "the continuation can only be compatible, which needs consent"
        )


async def check_owner(target: Target, offer: Offer) -> None:
    """What the source says about ownership is compared with the directory, not believed."""
    if offer.session_id in target.sessions:
        raise TransferStateError(f"session {offer.session_id}: lives here")
    if offer.token is None:
        return
    entry = await target.sessions.directory.owner(offer.session_id)
    if (
        not isinstance(entry, Ownership)
        or entry.node != offer.key.source
        or entry.token != offer.token
    ):
        raise StaleTokenError(
            f"session {offer.session_id}: node {offer.key.source} does not own it "
            f"by revision {offer.token.revision}"
        )


async def claim(target: Target, offer: Offer) -> OwnershipToken:
    """A copy is this node's own session: claimed first, published by the commit."""
    directory, nonce = target.sessions.directory, offer.claim_nonce
    entry = await directory.owner(offer.session_id)
    if isinstance(entry, Ownership) and entry.nonce == nonce:
        return entry.token  # by this transfer, before a restart
    try:
        return await directory.claim(offer.session_id, target.sessions.node, nonce)
    except DirectoryAmbiguousError:
        entry = await directory.owner(offer.session_id)
        if isinstance(entry, Ownership) and entry.nonce == nonce:
            return entry.token
        raise


async def let_go(target: Target, offer: Offer, base: OwnershipToken) -> None:
    """Give the claim of a copy up. A move has none: the session is the source's."""
    if offer.token is not None:
        return
    try:
        await target.sessions.directory.release(offer.session_id, base)
    except StaleTokenError:
        return
    except DirectoryError as error:
        # It stays claimed by this node, without a state, until its id is opened here again.
        log.error("%s: the claim of %s stays: %s", offer.key, offer.session_id, error)


async def base_of(target: Target, entry: Entry) -> OwnershipToken | None:
    """The token that the commit of an interrupted transfer starts from; None: nobody knows.

    Raises:
        DirectoryError: The directory cannot be read.
    """
    offer = remembered(entry)
    if offer is None or not offer.copy:
        return None if offer is None else offer.token
    owner = await target.sessions.directory.owner(entry.session_id)
    if isinstance(owner, Ownership) and owner.nonce in (offer.claim_nonce, offer.nonce):
        return owner.token
    return None


async def find_held(target: Target, offer: Offer) -> HeldObjects:
    """What the storage tier has of the rows that are offered. A proposal: ids decide."""
    tier = target.tier
    if tier is None or not offer.token_chunks:
        return NothingHeld()
    return await tier.find(offer.session_id, open_token_ids(target.binding, offer))


def open_spool(target: Target, offer: Offer) -> HeldObjects:
    found = left_over(target.spool_dir / spool_name(offer.key))
    return HeldFile(found[0], len(offer.header_bytes)) if found else NothingHeld()


def remembered(entry: Entry) -> Offer | None:
    """What the transfer was prepared with, if this version still understands it."""
    try:
        request = pb.PrepareRequest.FromString(entry.request)
        return read_offer(request, entry.key.source) if entry.request else None
    except (KvpackError, DecodeError):
        return None


def open_token_ids(binding: PackBinding, offer: Offer) -> list[int]:
    """The tokens of an offer, from the chunks that it carries.

    Raises:
        InventoryError: Chunks of something else, or not one after the other from 0 on.
        KvpackError: A chunk does not open.
    """
    token_ids: list[int] = []
    for number, data in enumerate(offer.token_chunks):
        opened = open_chunk(binding.context, data, f"prepare.token_chunks[{number}]")
        reference = opened.reference
        found = (reference.chunk_class, reference.first_position)
        if found != (ChunkClass.TOKEN_IDS, len(token_ids)):
            raise InventoryError(f"prepare.token_chunks[{number}]: not the next token ids")
        token_ids.extend(parse_token_ids(opened))
    return token_ids


def spool_name(key: TransferKey) -> str:
    """File name of the pack of a transfer. Source names are DNS labels."""
    return f"{key.source}.{key.epoch}.{key.number}.kvpack"
