"""After a restart: settle what was under way, and serve again what is durable.

A session that came by a move has a durable pack, so it comes back, and so does one that the
records know: a conversation, as of its last whole turn. Where both do, the newer one counts. One
that was opened here and never published is lost with the process; that is the stated loss bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.bundle import BundleReader, parse_token_ids
from kvpack.chunk import ChunkClass, tile_of
from kvpack.errors import KvpackError
from kvpack.identity import require_same_identity
from kvpack.keys import Keyring
from kvpack.publish import is_private_name
from node import fault_points
from node.directory import NONCE_BYTES, Ownership, settle, transfer_settled
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    InventoryError,
    JournalError,
    StaleTokenError,
)
from node.migration.admission import Target, base_of, spool_name
from node.migration.journal import Entry
from node.migration.messages import nonce_of
from node.migration.spool import private_paths
from node.migration.table import TargetState
from node.migration.target import Transfers
from node.packs import require_engine_rows
from node.remembered import Memory, recalled
from node.session import Session
from node.state import SessionState, decode_sampler, decode_state
from node.stores import StoreRoots
from node.transient import is_transient
from node.unparked import fetch_back

if TYPE_CHECKING:
    from engine import DecodingState

log = logging.getLogger(__name__)

#: How often a start raises a session's revision, each time from what the directory says by then.
RAISES_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a restart brought back, and what it could not."""

    restored: tuple[str, ...]
    lost: tuple[str, ...]


async def recover(
    target: Target,
    transfers: Transfers,
    roots: StoreRoots | None = None,
    memory: Memory | None = None,
) -> Recovered:
    """Settle or reopen open transfers, remove leftovers, restore sessions. Before serving anything.

    Args:
        target: This node.
        transfers: Its transfers.
        roots: Where stores may lie; None: nowhere.
        memory: What is remembered of sessions beside packs; None: nothing.

    Raises:
        DirectoryError: The directory cannot be read: then nothing may be served.
        JournalError: The journal cannot be read.
        RecordsError: What is remembered cannot be read.
    """
    unsettled = await _settle(target, transfers)
    packs = await target.journal.held_packs()
    owned = await target.sessions.directory.owned_by(target.sessions.node)
    for session_id in sorted(packs.keys() - {entry.session_id for entry in owned}):
        entry = await _let_go(target, session_id, packs[session_id])
        if entry is not None:
            owned.append(entry)
    await asyncio.to_thread(
        _remove_leftovers, target.spool_dir, _kept(target, transfers, {*packs.values(), *unsettled})
    )
    claimed = {offer.session_id for offer in transfers.open_offers()}
    restored: list[str] = []
    lost: list[str] = []
    for entry in owned:
        if is_transient(entry.session_id):
            await _give_up(target, entry, packs.get(entry.session_id))
            continue
        try:
            newer = await fetch_back(target, roots or StoreRoots(), entry)
        except (DirectoryError, JournalError):
            raise
        except (KvpackError, OSError) as error:
            # A pack from before would lose what lies there whole, and so would opening it anew.
            log.error("session %s: lies in a store, out of reach: %s", entry.session_id, error)
            lost.append(entry.session_id)
            continue
        older = packs.get(entry.session_id)
        if newer is not None and older is not None:
            # The journal names the newer one by now: nobody else would remove it before a restart.
            await asyncio.to_thread((target.spool_dir / older).unlink, missing_ok=True)
        name = newer or older
        pack = None if name is None else target.spool_dir / name
        if await _restore(target, entry, pack, memory):
            restored.append(entry.session_id)
        elif entry.session_id not in claimed:
            lost.append(entry.session_id)
            target.sessions.note_lost(entry.session_id)
            log.warning("session %s: owned by this node, but not durable here", entry.session_id)
    return Recovered(tuple(restored), tuple(lost))


async def _give_up(target: Target, entry: Ownership, pack: str | None) -> None:
    """Release the session of a remote prefill: who waited for it went away with the restart."""
    with contextlib.suppress(StaleTokenError):
        await target.sessions.directory.release(entry.session_id, entry.token)
    if pack is not None:
        await target.journal.let_go(entry.session_id, pack)


async def _let_go(target: Target, session_id: str, pack: str) -> Ownership | None:
    """Drop a pack whose session went elsewhere. One that the directory does not know is kept.

    Returns:
        The entry, where it is this node's after all: it was away when the list was made.
    """
    record = await target.sessions.directory.owner(session_id)
    if isinstance(record, Ownership) and record.node == target.sessions.node:
        return record
    if record is None:
        log.warning("session %s: unknown to the directory; its pack is kept", session_id)
        return None
    await target.journal.let_go(session_id, pack)
    with contextlib.suppress(OSError):
        await asyncio.to_thread((target.spool_dir / pack).unlink, missing_ok=True)
    return None


def _kept(target: Target, transfers: Transfers, names: set[str]) -> set[str]:
    """Names in the spool folder that are nobody's leftovers."""
    for offer in transfers.open_offers():
        names |= {path.name for path in private_paths(target.spool_dir / spool_name(offer.key))}
    return names


async def _settle(target: Target, transfers: Transfers) -> set[str]:
    """Settle every transfer that a restart interrupted.

    One whose pack was published may have sent its compare-and-swap, which may even arrive later: it
    is settled by a write, as if its reply had been lost. One without a pack never sent it, and goes
    on where its spool ends, if its source still owns the session.

    Returns:
        Names of packs whose fate the directory does not tell yet: they are kept for a later start.
    """
    unsettled: set[str] = set()
    for entry in await target.journal.open_entries():
        name = spool_name(entry.key)
        if (target.spool_dir / name).is_file():
            await _settle_published(target, transfers, entry, unsettled)
        elif not await transfers.reload(entry):
            log.info("%s: aborted by a restart", entry.key)
            await transfers.abandon(entry)
    return unsettled


async def _settle_published(
    target: Target, transfers: Transfers, entry: Entry, unsettled: set[str]
) -> None:
    name = spool_name(entry.key)
    try:
        committed = await _is_committed(target, transfers, entry)
    except DirectoryAmbiguousError as error:
        if await target.sessions.directory.owner(entry.session_id) is not None:
            # It is only away. A start without it would own the session and serve it nowhere.
            raise
        log.warning("%s: stays open over this start: %s", entry.key, error)
        unsettled.add(name)
        return
    if committed:
        log.info("%s: committed before a restart", entry.key)
        await target.journal.record(entry.key, TargetState.COMMITTED, name)
        fault_points.reach("target.settle.recorded")
    else:
        log.info("%s: aborted by a restart", entry.key)
        await transfers.abandon(entry)


async def _is_committed(target: Target, transfers: Transfers, entry: Entry) -> bool:
    """Whether the session of a published pack is this node's; makes it so where it still can."""
    directory, node = target.sessions.directory, target.sessions.node
    base = await base_of(target, entry)
    try:
        if base is not None:
            await settle(directory, entry.session_id, base, node, nonce_of(entry.key, entry.digest))
            return True
    except StaleTokenError:
        pass
    # Ours under a later write of our own: the session was to move on, stayed, and this entry was
    # never closed because the journal failed at the swap.
    owner = await directory.owner(entry.session_id)
    ours = isinstance(owner, Ownership) and owner.node == node
    return ours and entry.session_id not in await target.journal.held_packs()


def _remove_leftovers(folder: Path, known: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in known and (is_private_name(path.name) or path.suffix == ".kvpack"):
            with contextlib.suppress(OSError):
                path.unlink()


async def _restore(
    target: Target, entry: Ownership, pack: Path | None, memory: Memory | None
) -> bool:
    """Take the session over from the process before, then bring it back from what there is.

    The raised revision fences a process of this name that is only paused, and tells clients that
    what they were told since the last published cut may be gone.
    """
    remembered = None if memory is None else await memory.recall(entry.session_id, None)
    if pack is None and remembered is None:
        return False
    try:
        entry = await _raise(target, entry)
        fault_points.reach("target.restore.raised")
    except StaleTokenError:
        log.warning("session %s: not owned by this node any more", entry.session_id)
        if pack is not None:
            await _let_go(target, entry.session_id, pack.name)
        return False
    session = None if pack is None else await _loaded(target, entry, pack)
    if session is not None and memory is not None:
        remembered = await memory.recall(entry.session_id, session)
    if remembered is not None:
        session = await recalled(target.engine, session or await _empty(target, entry), remembered)
    if session is None:
        return False
    target.sessions.adopt(session)
    return True


async def _empty(target: Target, entry: Ownership) -> Session:
    generation = await target.engine.call(target.engine.model.new_generation)
    vocab_size = target.engine.model.vocab_size
    return Session(entry.session_id, entry.token, generation, (), vocab_size)


async def _loaded(target: Target, entry: Ownership, pack: Path) -> Session | None:
    try:
        return await _load(target, entry, pack)
    except (KvpackError, OSError) as error:
        log.error("session %s: its pack cannot be used: %s", entry.session_id, error)
        return None


async def _raise(target: Target, entry: Ownership) -> Ownership:
    directory, nonce = target.sessions.directory, secrets.token_bytes(NONCE_BYTES)
    for _ in range(RAISES_MAX):
        try:
            token = await transfer_settled(
                directory, entry.session_id, entry.token, entry.node, nonce
            )
        except StaleTokenError:
            # Perhaps the raise of a start before, whose reply was lost, has only now arrived.
            found = await directory.owner(entry.session_id)
            if not isinstance(found, Ownership) or found.node != entry.node:
                raise
            entry = found
        else:
            return dataclasses.replace(entry, token=token, nonce=nonce)
    raise DirectoryError(f"session {entry.session_id}: raised {RAISES_MAX} times, always stale")


async def _load(target: Target, entry: Ownership, pack: Path) -> Session:
    engine, binding = target.engine, target.binding
    with BundleReader.open(pack, Keyring([binding.key])) as reader:
        require_same_identity(binding.identity, reader.header.identity)
        manifest = reader.manifest
        require_engine_rows(manifest)
        installer = await engine.call(engine.model.installer, manifest.position)
        token_ids: list[int] = []
        state: SessionState | None = None
        decoding: DecodingState | None = None
        for opened in reader.chunks():
            if opened.reference.has_rows:
                await engine.call(installer.scatter, tile_of(binding.layout, opened))
            elif opened.reference.chunk_class is ChunkClass.TOKEN_IDS:
                token_ids.extend(parse_token_ids(opened))
            elif opened.reference.chunk_class is ChunkClass.SESSION:
                state = decode_state(opened.plaintext)
            elif opened.reference.chunk_class is ChunkClass.SAMPLER:
                decoding = decode_sampler(opened.plaintext)
        if state is None:
            raise InventoryError(f"{pack.name}: no session chunk")
        mixed = not binding.owns(manifest.numerics)
        generation = await engine.call(installer.finish, manifest.schedule, mixed=mixed)
    session = Session(
        entry.session_id, entry.token, generation, [*token_ids, state.pending_token],
        engine.model.vocab_size, decoding,
    )  # fmt: skip
    session.restore(state)
    session.spool = pack
    return session
