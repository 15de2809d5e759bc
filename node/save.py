"""Saving a session as a pack while it goes on: windows are copied at the cut, all else read later.

Rows of full layers below the cut never change, so they are read tile by tile while the pack is
written. A ring's rows do change: those are copied while the session is held. Memory above the
session's own is one window set and a few tiles, whatever its length.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvpack.bundle import BundleWriter
from kvpack.chunk import ChunkClass, SealedChunk
from kvpack.identity import CallSchedule
from kvpack.layout import LayerKind
from kvpack.publish import PrivateFile, publish_new
from kvpack.snapshot import Tile, TileSpec
from node.binding import PackBinding
from node.engine_thread import EngineThread
from node.errors import SessionStateError
from node.migration.producer import seal_item
from node.migration.tape import Item, Tape
from node.packs import SavedPack, manifest_blob, state_bytes
from node.session import Session
from node.state import SessionState, encode_sampler, encode_state

if TYPE_CHECKING:
    from engine import Generation
    from node.stream import Stream


@dataclass(frozen=True, slots=True, repr=False)
class HeldCut:
    """A session at one position, as far as it has to be copied.

    Attributes:
        tape: What the pack holds, in order.
        generation: Where rows of full layers are read later.
        token_ids: All tokens known at the cut: the user's text.
        states: Plaintext of the SESSION and SAMPLER chunks.
        schedule: The calls that computed the rows.
        windows: The tiles of rings.
    """

    tape: Tape
    generation: Generation
    token_ids: list[int]
    states: Mapping[ChunkClass, bytes]
    schedule: CallSchedule
    windows: Mapping[Item, Tile]

    @property
    def position(self) -> int:
        """Tokens of the cut."""
        return self.tape.cut or 0


async def cut_now(engine: EngineThread, binding: PackBinding, session: Session) -> HeldCut:
    """Cut a session that the caller holds and that has no backlog.

    Raises:
        SessionStateError: Nothing is computed yet.
    """
    position = session.position
    if not 0 < position < session.next_index:
        raise SessionStateError(
            f"session {session.session_id}: nothing to save: {position} tokens are computed"
        )
    return await cut_rows(engine, binding, session, state_bytes(session, position))


async def cut_stream(engine: EngineThread, binding: PackBinding, stream: Stream) -> HeldCut:
    """Cut a context that is nobody's session, where it stands. Nobody else touches it meanwhile.

    Raises:
        SessionStateError: Nothing is computed yet.
    """
    position = stream.position
    if not 0 < position < stream.next_index:
        raise SessionStateError(f"nothing to save: {position} tokens are computed")
    states = {
        ChunkClass.SESSION: encode_state(SessionState(stream.token_ids[position])),
        ChunkClass.SAMPLER: encode_sampler(stream.decoding),
    }
    return await cut_rows(engine, binding, stream, states)


async def cut_rows(
    engine: EngineThread, binding: PackBinding, stream: Stream, states: Mapping[ChunkClass, bytes]
) -> HeldCut:
    """Copy what a next call would overwrite; ``states`` is what stands beside the rows."""
    position = stream.position
    tape = Tape.known(binding.layout, position)
    generation = stream.generation
    windows: dict[Item, Tile] = {}
    for item in tape.items:
        if isinstance(item, TileSpec) and item.kind is LayerKind.SWA:
            windows[item] = await engine.call(generation.read_tile, item)
    ids = list(stream.token_ids[: position + 1])
    return HeldCut(tape, generation, ids, states, generation.schedule, windows)


async def write_cut(
    engine: EngineThread, binding: PackBinding, cut: HeldCut, path: Path
) -> SavedPack:
    """Write a cut as a new pack; durable on return. The session may go on meanwhile.

    Raises:
        PublishError: The name exists, or the disk refuses. Nothing is visible.
    """
    async with contextlib.AsyncExitStack() as stack:
        publication = publish_new(path)
        sink = await asyncio.to_thread(publication.__enter__)

        async def leave(*raised: object) -> bool | None:
            return await asyncio.to_thread(publication.__exit__, *raised)  # type: ignore[arg-type]

        stack.push_async_exit(leave)
        file_bytes = await write_pack(engine, binding, cut, sink)
    return SavedPack(path, file_bytes, cut.position)


async def write_pack(
    engine: EngineThread, binding: PackBinding, cut: HeldCut, sink: PrivateFile
) -> int:
    """Write a cut into ``sink``; gives the bytes of the pack."""
    writer = BundleWriter(sink, binding.key, binding.header_bytes)
    async for chunk in chunks_of(engine, binding, cut):
        await asyncio.to_thread(writer.add, chunk)
    mixed = cut.generation.is_mixed
    blob = manifest_blob(binding, cut.position, cut.schedule, writer.references, mixed=mixed)
    await asyncio.to_thread(writer.finish, blob)
    return sink.written_bytes


async def chunks_of(
    engine: EngineThread, binding: PackBinding, cut: HeldCut
) -> AsyncIterator[SealedChunk]:
    """Every chunk of a cut, in order, each sealed when it is asked for."""
    for item in cut.tape.items:
        tile = await _tile(engine, cut, item)
        yield await asyncio.to_thread(seal_item, binding, cut.token_ids, cut.states, item, tile)


async def _tile(engine: EngineThread, cut: HeldCut, item: Item) -> Tile | None:
    if not isinstance(item, TileSpec):
        return None
    kept = cut.windows.get(item)
    return kept if kept is not None else await engine.call(cut.generation.read_tile, item)
