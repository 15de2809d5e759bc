"""The storage tier of a node: cuts in a local store, for whoever can begin from one.

What came from a peer is kept only after every content id was recomputed here; until then its rows
serve the session they came with and nothing else. Keeping happens in the background and may be left
out: a tier that is full, slow or broken costs later transfers their bytes, and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.bundle import BundleReader, parse_token_ids
from kvpack.chunk import ChunkClass, ChunkReference
from kvpack.errors import KvpackError
from kvpack.keys import Keyring
from kvpack.limits import GRID_TOKENS
from kvpack.store import (
    Budget,
    CutReader,
    HoldKind,
    LocalStore,
    WriterTools,
    cuts_of,
    find_deepest,
    import_bundle,
    open_store,
    pinned_cut,
    tidy_store,
)
from kvpack.store.writer import INTENT_S
from node.binding import PackBinding
from node.files import make_private_folder
from node.migration.held import HELD_MAX, HeldObjects, NothingHeld

log = logging.getLogger(__name__)

#: Packs that wait to be kept. What comes while so many wait is not kept. A drain brings a node as
#: many sessions as another one may have, and what they came as is kept when it is over.
WAITING_MAX: Final = 64

#: How long a pack waits for sessions that are on their way: whoever moves has nobody to serve it,
#: and keeping costs as much processor time as taking a session does.
YIELD_S: Final = 60.0

#: How long nobody must be on the way: between two moves of a drain there is a moment without one.
QUIET_S: Final = 0.25

_LOOK_S: Final = 0.05

#: How long a Prepare waits for the store. Whoever takes longer holds nothing.
FIND_S: Final = 5.0

#: How long chunks that were offered as held stay pinned: as long as a stream may take.
PIN_S: Final = 6 * 3600

_PAUSE_S: Final = 0.05


def lineage_of(binding: PackBinding, session_id: str) -> bytes:
    """16 bytes for all cuts of one session. Keyed: a store's names tell no session's name."""
    return binding.key.subkey("session-lineage", session_id.encode())[:16]


def tools(budget: Budget, intent_s: int = INTENT_S) -> WriterTools:
    """What a writer of the store may not draw by itself."""
    return WriterTools(
        secrets.token_bytes(16), time.time, lambda: time.sleep(_PAUSE_S), budget, intent_s
    )


def _never() -> bool:
    return False


class HeldCut:
    """The chunks of one stored cut, pinned: no collector takes them while a transfer may ask."""

    def __init__(self, reader: CutReader, pins: contextlib.ExitStack) -> None:
        self._reader = reader
        self._pins = pins
        self._references: dict[bytes, ChunkReference] = {
            reference.seal_id: reference
            for reference in reader.cut.manifest.references
            if reference.has_rows and not reference.is_trimmed
        }

    def seal_ids(self) -> list[bytes]:
        """Of all chunks of rows."""
        return list(self._references)[:HELD_MAX]

    def read(self, seal_id: bytes) -> bytes | None:
        """The object; None where it is none of them, or the store lost it."""
        reference = self._references.get(seal_id)
        if reference is None:
            return None
        try:
            return self._reader.object(reference)
        except KvpackError as error:
            log.warning("a chunk that was offered as held: %s", error)
            return None

    def close(self) -> None:
        """Let the collector have them."""
        with contextlib.suppress(KvpackError):
            self._pins.close()


class Tier:
    """One store of one node.

    Args:
        store: The store.
        inbox: A folder on the same volume, for packs that wait.
        binding: What this node's packs are bound to.
        budget: What the store may take.
    """

    def __init__(
        self, store: LocalStore, inbox: Path, binding: PackBinding, budget: Budget
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._binding = binding
        self._budget = budget
        self._keyring = Keyring([binding.key])
        self._waiting: asyncio.Queue[_Wish] = asyncio.Queue(WAITING_MAX)
        self._worker: asyncio.Task[None] | None = None
        self._busy: Callable[[], bool] = _never

    @classmethod
    def open(cls, folder: Path, binding: PackBinding, budget: Budget | None = None) -> Tier:
        """Open the store in ``folder``; makes one where there is none.

        Raises:
            KvpackError: The folder is something else, or the volume refuses.
        """
        inbox = folder.with_name(f"{folder.name}-inbox")
        make_private_folder(inbox)
        for left_over in inbox.iterdir():
            left_over.unlink(missing_ok=True)
        return cls(open_store(folder, create=True), inbox, binding, budget or Budget())

    @property
    def store(self) -> LocalStore:
        """The store, for whoever keeps cuts of its own in it."""
        return self._store

    def start(self, busy: Callable[[], bool] = _never) -> None:
        """Begin to keep what is handed in, while ``busy`` does not say that others wait for it."""
        self._busy = busy
        self._worker = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop. What waits is not kept."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})

    def keep_later(self, session_id: str, pack: Path, *, own: bool) -> None:
        """Keep a published pack as a cut, some time.

        A second name is made at once, so the pack may be removed meanwhile.

        Args:
            session_id: Whose.
            pack: Where it is.
            own: This node computed its rows: other sessions may begin from them, too.
        """
        try:
            copy = self._inbox / f"{secrets.token_hex(16)}.kvpack"
            copy.hardlink_to(pack)
        except OSError as error:
            log.info("session %s: its pack is not kept: %s", session_id, error.strerror)
            return
        try:
            self._waiting.put_nowait(_Wish(session_id, copy, own))
        except asyncio.QueueFull:
            copy.unlink(missing_ok=True)
            log.info("session %s: its pack is not kept: %d wait", session_id, WAITING_MAX)

    async def settled(self) -> None:
        """Return once everything that was handed in is kept or given up."""
        await self._waiting.join()

    async def find(self, session_id: str, token_ids: Sequence[int]) -> HeldObjects:
        """The chunks of the deepest cut that a session may begin from.

        That is one of its own, or one whose rows this node computed. Numerics do not matter: what
        counts for the source is whether rows are equal, by content id.
        """
        work = asyncio.to_thread(self._find, session_id, tuple(token_ids))
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=FIND_S)
        if not done:
            log.warning("session %s: the store takes longer than %.0f s", session_id, FIND_S)
            task.add_done_callback(_close)
            return NothingHeld()
        try:
            return task.result()
        except KvpackError as error:
            log.warning("session %s: the store finds nothing: %s", session_id, error)
            return NothingHeld()

    def _tidy(self) -> None:
        """Remove what a process that died left of its own writing."""
        tidy_store(self._store, int(time.time()), lambda: time.sleep(_PAUSE_S))

    async def _work(self) -> None:
        try:
            await asyncio.to_thread(self._tidy)
        except KvpackError as error:
            log.warning("the store of cuts: %s", error)
        while True:
            wish = await self._waiting.get()
            await self._let_others_first()
            try:
                await asyncio.to_thread(self._keep, wish)
            except (KvpackError, OSError) as error:
                log.warning("session %s: its pack is not kept: %s", wish.session_id, error)
            finally:
                wish.pack.unlink(missing_ok=True)
                self._waiting.task_done()

    async def _let_others_first(self) -> None:
        """Wait while others are busy, for a bounded time: rows that are not kept travel again."""
        now_s = seen_s = time.monotonic()
        end_s = now_s + YIELD_S
        while now_s < end_s and now_s - seen_s < QUIET_S:
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            if self._busy():
                seen_s = now_s

    def _keep(self, wish: _Wish) -> None:
        """Every tag and content id is recomputed on the way in."""
        with BundleReader.open(wish.pack, self._keyring) as reader:
            import_bundle(
                self._store, self._keyring, reader,
                lineage_of(self._binding, wish.session_id), tools(self._budget),
                kind=HoldKind.TURN, indexed_ids=_token_ids(reader) if wish.own else None,
            )  # fmt: skip
            position = reader.manifest.position
        log.info("session %s: kept, %d tokens", wish.session_id, position)

    def _find(self, session_id: str, token_ids: tuple[int, ...]) -> HeldObjects:
        binding = self._binding
        own = self._deepest_of(lineage_of(binding, session_id), token_ids)
        found = find_deepest(self._store, self._keyring, binding.key, binding.header, token_ids)
        cut_id, position = own
        if found.cut is not None and found.position > position:
            cut_id, position = found.cut.cut_id, found.position
        if position < GRID_TOKENS:
            return NothingHeld()
        pins = contextlib.ExitStack()
        pins.enter_context(pinned_cut(self._store, cut_id, tools(self._budget, PIN_S)))
        return HeldCut(CutReader(self._store, self._keyring, cut_id), pins)

    def _deepest_of(self, lineage: bytes, token_ids: tuple[int, ...]) -> tuple[bytes, int]:
        """``(cut id, position)`` of a session's deepest cut that ``token_ids`` begin with."""
        holds = sorted(cuts_of(self._store, lineage), key=lambda hold: -hold.position)
        for hold in holds:
            if hold.position > len(token_ids):
                continue
            reader = CutReader(self._store, self._keyring, hold.cut_id)
            if reader.token_ids() == token_ids[: hold.position]:
                return hold.cut_id, hold.position
        return b"", 0


@dataclass(frozen=True, slots=True)
class _Wish:
    session_id: str
    pack: Path
    own: bool


def _close(late: asyncio.Task[HeldObjects]) -> None:
    """Let go of what was found too late."""
    if not late.cancelled() and late.exception() is None:
        late.result().close()


def _token_ids(reader: BundleReader) -> list[int]:
    return [
        token_id
        for opened in reader.chunks()
        if opened.reference.chunk_class is ChunkClass.TOKEN_IDS
        for token_id in parse_token_ids(opened)
    ]
