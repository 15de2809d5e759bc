"""What has arrived of one transfer: rows in a detached generation, objects in a private file.

Every chunk is opened (which checks its tag, model, layout and tenant) before anything is done with
it. Its rows are scattered at once; its object goes, as it came, into the pack being written. No
name on disk and no session points here until the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.bundle import parse_token_ids
from kvpack.chunk import (
    ChunkClass,
    ChunkHeader,
    ChunkReference,
    OpenedChunk,
    open_chunk,
    open_parsed,
    parse_object,
    tile_of,
)
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallSchedule
from kvpack.manifest import KnownReferences, open_manifest
from kvpack.snapshot import Tile
from node import fault_points
from node.binding import PackBinding
from node.engine_thread import EngineThread
from node.errors import InventoryError
from node.migration.held import HeldObjects
from node.migration.messages import Inventory, Offer
from node.migration.spool import Pack
from node.migration.wire import Cut, Held, Piece
from node.packs import require_engine_rows
from node.state import SessionState, decode_sampler, decode_state

if TYPE_CHECKING:
    from engine import DecodingState, Generation, Installer

_ACCEPTED: Final = (
    ChunkClass.FULL,
    ChunkClass.SWA,
    ChunkClass.TOKEN_IDS,
    ChunkClass.SESSION,
    ChunkClass.SAMPLER,
)


@dataclass(frozen=True, slots=True, repr=False)
class Arrived:
    """The parts of a session that arrived whole, before anybody can see it.

    Attributes:
        generation: The rows of the cut.
        token_ids: All known tokens: the cut's and the boundary token.
        state: What it is beyond that.
        decoding: Its sampler and text; None where the source sent none.
    """

    generation: Generation
    token_ids: list[int]
    state: SessionState
    decoding: DecodingState | None


class Receiver:
    """Takes the chunks of one transfer, in any order, until it is sealed or dropped."""

    def __init__(
        self,
        engine: EngineThread,
        binding: PackBinding,
        offer: Offer,
        installer: Installer,
        spool: Pack,
        held: HeldObjects,
    ) -> None:
        self._engine = engine
        self._binding = binding
        self._offer = offer
        self._installer: Installer | None = installer
        self._spool = spool
        # Encoded and looked at as they come, while the source computes: at Seal everybody waits.
        self._references = KnownReferences(layout=binding.layout)
        self._object_bytes = 0
        self._seal_ids: set[bytes] = set()
        self._token_ids: dict[int, tuple[int, ...]] = {}
        self._state: SessionState | None = None
        self._decoding: DecodingState | None = None
        self._manifest = b""
        self._cut = None if offer.growing else offer.position
        self._held = held
        self._scratch = bytearray()

    @classmethod
    async def begin(
        cls,
        engine: EngineThread,
        binding: PackBinding,
        offer: Offer,
        make_spool: Callable[[], Pack],
        held: HeldObjects,
    ) -> Receiver:
        """Take the memory and begin the private file.

        Raises:
            PublishError: The folder or the volume refuses.
            LimitError: The position is outside the model's context.
        """
        installer = await engine.call(engine.model.installer, offer.position, growing=offer.growing)
        spool = await asyncio.to_thread(make_spool)
        return cls(engine, binding, offer, installer, spool, held)

    @property
    def objects(self) -> int:
        """Chunks received."""
        return len(self._references)

    @property
    def object_bytes(self) -> int:
        """Their bytes, as objects."""
        return self._object_bytes

    @property
    def durable_objects(self) -> int:
        """How many of the chunks would outlive a power cut."""
        return self._spool.durable_objects

    @property
    def held_seal_ids(self) -> list[bytes]:
        """Chunks that need only be named."""
        return self._held.seal_ids()

    async def take_piece(self, piece: Piece) -> None:
        """Take one piece of the stream: a chunk object, the name of one, or the cut.

        Raises:
            InventoryError: A chunk that is not held was named, or a second cut.
            KvpackError: What :meth:`take` raises.
        """
        if isinstance(piece, Held):
            found = await asyncio.to_thread(self._held.read, piece.seal_id)
            if found is None:
                raise InventoryError(f"chunks[{self.objects}]: not held here, and not sent")
            await self.take(memoryview(found))
        elif isinstance(piece, Cut):
            await self._fix(piece.position)
        else:
            await self.take(piece)

    async def _fix(self, position: int) -> None:
        if self._cut is not None and position != self._cut:
            raise InventoryError(f"cut at {position}, but it is at {self._cut}")
        if self._cut is None:
            await self._engine.call(self._require_installer().fix, position)
            self._cut = position

    async def take(self, piece: memoryview) -> None:
        """Take one chunk object.

        Raises:
            InventoryError: It was here before, or does not belong to such a pack.
            FormatError: It is not a chunk of this session; also LimitError, AuthenticationError,
                UnknownKeyError, IdentityMismatchError and LayoutMismatchError.
            PublishError: The disk is full.
        """
        header = self._parse_new(piece)
        # To a thread and back takes as long as opening 2 MiB; only a disk may take any time.
        opened = (
            await asyncio.to_thread(self._open_and_place, header, piece)
            if self._spool.blocks
            else self._open_and_place(header, piece)
        )
        if isinstance(opened, Tile):
            await self._engine.call(self._scatter, opened)
        self._note(header.reference, opened)

    def take_at_once(self, piece: Piece) -> bool:
        """Take one chunk object now, if there is nothing to wait for: neither disk nor engine.

        Returns:
            Whether it was taken; if not, nothing has happened and :meth:`take_piece` takes it.

        Raises:
            KvpackError: As :meth:`take`.
        """
        return not self._spool.blocks and self.take_in_thread(piece)

    def take_in_thread(self, piece: Piece) -> bool:
        """As :meth:`take_at_once`, where a disk may be waited for."""
        if not isinstance(piece, memoryview):
            return False
        header = self._parse_new(piece)
        if not self._has_room(header.reference):
            return False
        self._note(header.reference, self._open_and_place(header, piece))
        return True

    def _parse_new(self, piece: memoryview) -> ChunkHeader:
        header = parse_object(piece)
        self._check_new(header.reference, self._where)
        return header

    @property
    def _where(self) -> str:
        """Name of the next chunk in errors."""
        return f"chunks[{self.objects}]"

    def _has_room(self, reference: ChunkReference) -> bool:
        """Whether memory for its rows was taken: the engine takes more, nobody else."""
        if self._cut is not None or not reference.has_rows:
            return True
        end_position = reference.first_position + reference.token_count
        return end_position <= self._require_installer().position

    def _note(self, reference: ChunkReference, opened: OpenedChunk | Tile) -> None:
        """Keep what the opened chunk says, but for rows, which are where they belong."""
        if reference.has_rows or isinstance(opened, Tile):
            pass
        elif reference.chunk_class is ChunkClass.TOKEN_IDS:
            self._token_ids[reference.first_position] = parse_token_ids(opened)
        elif reference.chunk_class is ChunkClass.SAMPLER:
            self._decoding = decode_sampler(opened.plaintext)
        else:
            self._state = decode_state(opened.plaintext)
        self._seal_ids.add(reference.seal_id)
        self._references.append(reference)
        self._object_bytes += reference.object_bytes
        fault_points.reach("target.chunk.taken")

    def _scatter(self, tile: Tile) -> None:
        installer = self._require_installer()
        if self._cut is None:
            installer.grow(tile.spec.end_position)
        installer.scatter(tile)

    async def seal(self, inventory: Inventory) -> Arrived:
        """Gate everything that arrived against the manifest.

        Returns:
            The session's parts, detached.

        Raises:
            InventoryError: What arrived is not what was sealed.
            AuthenticationError: The manifest's MAC does not match.
            FormatError: The gate refuses; also LimitError, IdentityMismatchError and
                LayoutMismatchError.
        """
        schedule = await asyncio.to_thread(self._gate, inventory)
        state = self._state
        if state is None:
            raise InventoryError("no session chunk arrived")
        token_ids: list[int] = []
        for first in sorted(self._token_ids):
            token_ids += self._token_ids[first]
        if len(token_ids) != self._cut:
            raise LayoutMismatchError("token_ids", self._cut, len(token_ids))
        mixed = not self._binding.owns(self._offer.numerics)
        finish = self._require_installer().finish
        generation = await self._engine.call(finish, schedule, mixed=mixed)
        self._let_go()
        self._manifest = inventory.manifest
        token_ids.append(state.pending_token)
        return Arrived(generation, token_ids, state, self._decoding)

    async def publish(self) -> None:
        """Finish the pack and make it durable under its name.

        Raises:
            PublishError: The name exists, or the disk refuses.
        """
        if self._spool.blocks:
            await asyncio.to_thread(self._spool.publish, self._manifest)
        else:
            self._spool.publish(self._manifest)
        self._held.close()

    async def drop(self) -> None:
        """Free the memory and remove the file, private or published."""
        self._let_go()
        self._held.close()
        await asyncio.to_thread(self._spool.drop)

    async def suspend(self) -> None:
        """Free the memory and leave the file to the next start of this node."""
        self._let_go()
        self._held.close()
        await asyncio.to_thread(self._spool.suspend)

    def _let_go(self) -> None:
        """Free what was for chunks to come: an ended transfer is kept for who asks what it was."""
        self._installer = None
        self._scratch = bytearray()
        self._token_ids = {}

    def read_logits(self, sealed: bytes) -> bytes:
        """The boundary logits of the source, from their chunk object.

        Raises:
            InventoryError: A chunk of another class or position.
            FormatError: It does not open; also AuthenticationError and the like.
        """
        opened = open_chunk(self._binding.context, sealed, "seal.boundary_logits")
        reference = opened.reference
        found = (reference.chunk_class, reference.first_position)
        if found != (ChunkClass.FINAL_LOGITS, self._cut):
            raise InventoryError("seal.boundary_logits: not the boundary call's logits")
        return bytes(opened.plaintext)

    def _check_new(self, reference: ChunkReference, where: str) -> None:
        """With the installer's own checks this bounds what one transfer can make us hold."""
        if reference.chunk_class not in _ACCEPTED:
            raise InventoryError(f"{where}: class {reference.chunk_class.value} is not sent")
        if reference.seal_id in self._seal_ids:
            raise InventoryError(f"{where}: this chunk was here before")
        if reference.chunk_class is ChunkClass.SESSION and self._state is not None:
            raise InventoryError(f"{where}: a second session chunk")
        if reference.chunk_class is ChunkClass.SAMPLER and self._decoding is not None:
            raise InventoryError(f"{where}: a second sampler chunk")
        if self._cut is None and reference.chunk_class is not ChunkClass.FULL:
            raise InventoryError(f"{where}: only rows of full layers come before the cut is named")
        if reference.chunk_class is ChunkClass.TOKEN_IDS and (
            reference.first_position + reference.token_count > (self._cut or 0)
            or reference.first_position in self._token_ids
        ):
            raise InventoryError(f"{where}: token ids beyond the cut, or twice")

    def _open_and_place(self, header: ChunkHeader, piece: memoryview) -> OpenedChunk | Tile:
        """Open a chunk, spool it, and copy its rows to where they belong.

        Rows are copied by whoever opened them: a session that decodes here does not wait for
        another one's. Only memory is the engine's to take, so rows without room are given back;
        those lie in the scratch buffer, which the next chunk overwrites.
        """
        reference, scratch = header.reference, None
        if reference.has_rows:
            # Fresh memory for every chunk would be zeroed before it is written.
            if len(self._scratch) < reference.encoded_bytes:
                self._scratch = bytearray(reference.encoded_bytes)
            scratch = self._scratch
        opened = open_parsed(self._binding.context, header, piece, self._where, scratch)
        self._spool.add(piece)
        if not reference.has_rows:
            return opened
        tile = tile_of(self._binding.layout, opened)
        if not self._has_room(reference):
            return tile
        self._require_installer().scatter(tile)
        return opened

    def _gate(self, inventory: Inventory) -> CallSchedule:
        key, header = self._binding.key, self._offer.header_bytes
        manifest = open_manifest(key, header, inventory.manifest, known=self._references)
        require_engine_rows(manifest)
        if manifest.position != self._cut:
            raise InventoryError(f"sealed at position {manifest.position}, the cut is {self._cut}")
        if manifest.numerics != self._offer.numerics:
            raise InventoryError("sealed under other numerics than were prepared for")
        if (inventory.objects, inventory.object_bytes) != (self.objects, self.object_bytes):
            raise InventoryError(
                f"sealed {inventory.objects} chunks of {inventory.object_bytes} bytes; "
                f"{self.objects} of {self.object_bytes} bytes arrived"
            )
        if manifest.references != self._references.references:
            raise InventoryError("the sealed references are not those of the chunks that arrived")
        return manifest.schedule

    def _require_installer(self) -> Installer:
        if self._installer is None:
            raise RuntimeError("no installer: sealed or dropped")
        return self._installer
