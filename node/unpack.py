"""A pack on disk, brought back as rows, tokens and state: detached, nobody's yet."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpack.bundle import BundleReader, parse_token_ids
from kvpack.chunk import ChunkClass, OpenedChunk, tile_of
from kvpack.identity import require_same_identity
from kvpack.keys import Keyring
from node.binding import PackBinding
from node.errors import ConsentError, InventoryError
from node.packs import require_engine_rows
from node.state import SessionState, decode_sampler, decode_state

if TYPE_CHECKING:
    from engine import DecodingState, Generation, Installer
    from node.engine_thread import EngineThread


@dataclass(frozen=True, slots=True, repr=False)
class Unpacked:
    """What a pack holds.

    Attributes:
        generation: The rows.
        token_ids: All known tokens, the pending one included. The user's text.
        state: What it is beyond that.
        decoding: How its next token is chosen.
        exact: Its rows are those this node would have computed.
        file_bytes: Of the pack.
    """

    generation: Generation
    token_ids: tuple[int, ...]
    state: SessionState
    decoding: DecodingState
    exact: bool
    file_bytes: int

    @property
    def position(self) -> int:
        """Tokens whose rows are there."""
        return self.generation.position


async def unpack(
    engine: EngineThread, binding: PackBinding, file: io.FileIO, *, accept_compatible: bool
) -> Unpacked:
    """Read a whole pack. The file is closed in every case.

    Every chunk is proved before its rows are used, and nobody sees them before all are.

    Raises:
        FormatError: No pack, or a damaged one; also VersionError, LimitError.
        UnknownKeyError: Another tenant's.
        AuthenticationError: It was changed.
        IdentityMismatchError: Another model's; also LayoutMismatchError.
        ConsentError: Other numerics, and nobody consented.
        InventoryError: Not a session's or slot's pack.
    """
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(file.close)
        reader = await asyncio.to_thread(BundleReader, file, Keyring([binding.key]))
        require_same_identity(binding.identity, reader.header.identity)
        manifest = reader.manifest
        require_engine_rows(manifest)
        different = binding.numerics.first_difference(manifest.numerics)
        if different is not None and not accept_compatible:
            name, ours, theirs = different
            raise ConsentError(f"numerics.{name}: expected {ours}, found {theirs}")
        installer = await engine.call(engine.model.installer, manifest.position)
        parts = _Parts()
        await _placed(reader, installer, binding, parts)
        state, decoding = parts.require()
        exact = binding.owns(manifest.numerics)
        generation = await engine.call(installer.finish, manifest.schedule, mixed=not exact)
        file_bytes = file.seek(0, io.SEEK_END)
    token_ids = (*parts.token_ids, state.pending_token)
    return Unpacked(generation, token_ids, state, decoding, exact, file_bytes)


class _Parts:
    """What of a pack is no rows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._state: SessionState | None = None
        self._decoding: DecodingState | None = None

    def take(self, opened: OpenedChunk) -> None:
        if opened.reference.chunk_class is ChunkClass.TOKEN_IDS:
            self.token_ids.extend(parse_token_ids(opened))
        elif opened.reference.chunk_class is ChunkClass.SESSION:
            self._state = decode_state(opened.plaintext)
        elif opened.reference.chunk_class is ChunkClass.SAMPLER:
            self._decoding = decode_sampler(opened.plaintext)

    def require(self) -> tuple[SessionState, DecodingState]:
        if self._state is None or self._decoding is None:
            raise InventoryError("pack: it holds rows alone, and not what comes next")
        return self._state, self._decoding


async def _placed(
    reader: BundleReader, installer: Installer, binding: PackBinding, parts: _Parts
) -> None:
    """Open every chunk and put its rows where they belong, by as many threads as there are cores.

    Whoever is cancelled waits for the chunks in hand: the file is closed after this.
    """
    stopping = threading.Event()

    def place(opened: OpenedChunk) -> None:
        if stopping.is_set():
            raise _StoppedError
        if opened.reference.has_rows:
            installer.scatter(tile_of(binding.layout, opened))
        else:
            parts.take(opened)

    work = asyncio.ensure_future(asyncio.to_thread(reader.pass_chunks, place))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stopping.set()
        await asyncio.gather(work, return_exceptions=True)
        raise


class _StoppedError(Exception):
    """Nobody waits for the rest of a pack any more."""
