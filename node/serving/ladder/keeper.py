"""The background: one cut after the other becomes durable, and room is made for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from kvpack.errors import KvpackError
from kvpack.store import (
    Budget,
    Hold,
    HoldKind,
    StoreBusyError,
    StoreError,
    StoreFullError,
    hold_cut,
    tidy_store,
)
from node.errors import NodeBusyError, NodeError
from node.serving.ladder.accounts import Accounts
from node.serving.ladder.capture import Capture, Reuse
from node.serving.ladder.collector import Collector
from node.serving.ladder.lineages import Lineages
from node.serving.ladder.pace import Pace
from node.serving.ladder.resident import Resident
from node.serving.ladder.restore import state_bytes
from node.serving.ladder.writing import CutWriting, Written, tools
from node.unexpected import unexpected

if TYPE_CHECKING:
    from kvpack.keys import EpochKey
    from kvpack.store import ObjectStore
    from node.economics.book import Book

log = logging.getLogger(__name__)

#: Cuts that wait, and what they may have copied. What comes while so much waits is not kept.
WAITING_MAX: Final = 32
WAITING_BYTES_MAX: Final = 256 << 20

#: Garbage is collected after so many cuts, also where there is room: windows outweigh all else.
COLLECT_EVERY: Final = 64

#: Where collecting did not make room, it is not tried again for so long.
FULL_S: Final = 30.0

#: How long somebody waits who cannot do without the cut, if too many wait already.
ROOM_S: Final = 30.0

#: How long an answer waits for a cut that is being written of the text that it continues.
SETTLE_S: Final = 2.0

#: A cut that is used again counts as used now; more often than that nobody needs to know.
USED_AGAIN_S: Final = 600

_PAUSE_S: Final = 0.02


class Keeper:
    """Takes captures and makes them durable, in order.

    Args:
        store: Where to.
        budget: What it may take.
        resident: Gets what was sealed.
        pace: How hard to work.
        lineages: Told what is held.
        accounts: What came of it is counted there.
        book: Where measured times go; None: nowhere.
    """

    def __init__(
        self,
        store: ObjectStore,
        budget: Budget,
        resident: Resident,
        pace: Pace,
        lineages: Lineages,
        accounts: Accounts,
        book: Book | None = None,
    ) -> None:
        self._store = store
        self._budget = budget
        self._resident = resident
        self.pace = pace
        self._lineages = lineages
        self._accounts = accounts
        self._book = book
        self._collector = Collector(store, budget)
        self._waiting: asyncio.Queue[Capture | Reuse] = asyncio.Queue(WAITING_MAX)
        self._waiting_bytes = 0
        self._captures: list[Capture] = []
        self._since_collected = 0
        self._full_until = 0.0
        self._room = asyncio.Event()
        self._ready = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        """Cuts that are not durable yet, the one that is written included."""
        return len(self._captures)

    @property
    def waiting_bytes(self) -> int:
        """What they have copied."""
        return self._waiting_bytes

    def start(self) -> None:
        """Begin to work."""
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
            self._worker.add_done_callback(self._ended)

    async def settled(self) -> None:
        """Return once everything that was handed in is durable or given up."""
        with self.pace.hurried():
            if self._worker is not None:
                await self._ready.wait()
            await self._waiting.join()

    async def settle(self, key: EpochKey, token_ids: tuple[int, ...], above: int) -> None:
        """Wait a little for the deepest cut under way that these tokens go on from.

        An answer whose text continues the one before it would else compute that again, only because
        it was asked for at once.
        """
        await self._until_ready()
        best = None
        for capture in self._captures:
            position, whose = capture.position, capture.line.binding.key
            if not above < position < len(token_ids) or whose != key or not capture.indexed:
                continue
            if capture.token_ids == token_ids[:position]:
                above, best = position, capture
        if best is None:
            return
        with contextlib.suppress(TimeoutError), self.pace.hurried():
            async with asyncio.timeout(SETTLE_S):
                await best.settled.wait()

    async def _until_ready(self) -> None:
        """Wait until it is known which cuts go on in which lineage; at a start that is soon."""
        if self._worker is None or self._ready.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self._ready.wait()

    async def close(self, drain_s: float) -> None:
        """Make durable what waits, for so many seconds at most, and stop."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self.settled()
        worker.cancel()
        await asyncio.wait({worker})

    def _ended(self, worker: asyncio.Task[None]) -> None:
        """Nothing is kept any more, and nobody waits for it."""
        self._worker = None
        self._ready.set()
        if not worker.cancelled():
            error = worker.exception()
            log.error("cuts are not kept any more: %s", error and unexpected(error))
        while not self._waiting.empty():
            job = self._waiting.get_nowait()
            self._failed(job, NodeBusyError("the node stops"))
            self._done(job)

    def drop(self) -> None:
        """Count a cut that was not even copied."""
        self._accounts.dropped += 1

    def has_room(self, ring_bytes: int) -> bool:
        """Whether one more cut may wait that copies so much."""
        fits = self._waiting_bytes + ring_bytes <= WAITING_BYTES_MAX or not self._waiting_bytes
        return fits and not self._waiting.full() and self._worker is not None

    async def wait_for_room(self, ring_bytes: int) -> None:
        """Wait until it has.

        Raises:
            NodeBusyError: It took too long.
        """
        try:
            async with asyncio.timeout(ROOM_S):
                while not self.has_room(ring_bytes):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise NodeBusyError(f"{self.pending} cuts wait to be written") from None

    def hand_in(self, job: Capture | Reuse) -> None:
        """Take a job, if there is room; else it is dropped and counted."""
        if self._worker is None or self._waiting.full():
            self._failed(job, NodeBusyError("too many cuts wait to be written"))
            return
        self._waiting.put_nowait(job)
        if isinstance(job, Capture):
            self._captures.append(job)
            self._lineages.plan(job.line.lineage, job.position)
            self._waiting_bytes += job.ring_bytes

    async def collect(self, needed_bytes: int = 0) -> None:
        """Collect garbage.

        Raises:
            StoreBusyError: Another process does.
            KvpackError: It cannot be told what is in use, or the volume refuses.
        """
        done = await self.pace.off_loop(self._collector.collect, needed_bytes)
        self._lineages.load(done.holds)
        for capture in self._captures:
            self._lineages.plan(capture.line.lineage, capture.position)
        self._since_collected = 0
        self._accounts.collections += 1
        self._accounts.evicted += done.evicted
        self._accounts.superseded += done.superseded

    async def _work(self) -> None:
        try:
            self._lineages.load(await asyncio.to_thread(self._collector.holds))
            self._ready.set()
            await asyncio.to_thread(self._tidy)
        except KvpackError as error:
            log.warning("the store of cuts: %s", error)
        finally:
            self._ready.set()
        while True:
            job = await self._waiting.get()
            try:
                await self._do(job)
            finally:
                self._done(job)
                # While nothing waits, nothing may hold a generation that its slot let go of.
                del job

    def _done(self, job: Capture | Reuse) -> None:
        if isinstance(job, Capture):
            self._captures.remove(job)
            self._waiting_bytes -= job.ring_bytes
            job.settled.set()
        self._waiting.task_done()
        self._room.set()

    def _tidy(self) -> None:
        tidy_store(self._store, int(time.time()), lambda: time.sleep(_PAUSE_S))

    async def _do(self, job: Capture | Reuse) -> None:
        """One job. Whatever the store does to it, the next one is tried all the same."""
        try:
            if isinstance(job, Reuse):
                await self._use_again(job)
            else:
                await self._keep(job)
                await self._collect_sometimes()
        except KvpackError as error:
            log.warning("a cut is not kept: %s", error)
            self._failed(job, error)
        except OSError as error:
            log.warning("a cut is not kept: %s", error)
            self._failed(job, StoreError(f"store: {error.strerror}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said and answered
            # One cut that this program cannot write says nothing of the next one.
            log.error("a cut is not kept: an error of this program: %s", unexpected(error))
            self._failed(job, NodeError(f"keeping it ended with {type(error).__name__}"))
        except BaseException:
            self._failed(job, NodeBusyError("the node stops"))
            raise

    async def _keep(self, capture: Capture) -> None:
        try:
            written = await self._write(capture)
        except StoreFullError as error:
            await self._make_room(error)
            written = await self._write(capture)
        self._note(capture, written)
        if capture.done is not None and not capture.done.done():
            capture.done.set_result(written.cut_id)
        if self._book is not None and capture.prefill is not None:
            size = state_bytes(capture.line.layout, written.references)
            at, prefill = capture.position, capture.prefill
            await self.pace.off_loop(self._book.computed, written.cut_id, at, size, prefill)

    async def _make_room(self, error: StoreFullError) -> None:
        """Collect for what did not fit; not again soon where that was of no use."""
        now = time.monotonic()
        if now < self._full_until:
            raise error
        self._full_until = now + FULL_S
        await self.collect(error.needed_bytes)

    async def _write(self, capture: Capture) -> Written:
        writing = CutWriting(self._store, self._resident, self.pace, self._budget, capture)
        return await writing.run()

    def _note(self, capture: Capture, written: Written) -> None:
        line, accounts = capture.line, self._accounts
        line.published(written.cut_id, capture.position, written.references)
        now = int(time.time())
        self._lineages.add(Hold(now, capture.position, line.lineage, capture.kind, written.cut_id))
        self._full_until = 0.0
        accounts.published += 1
        accounts.published_bytes += written.written_bytes
        accounts.shared_chunks += written.shared
        self._since_collected += 1

    def _failed(self, job: Capture | Reuse, error: KvpackError) -> None:
        if isinstance(job, Reuse):
            return
        self._accounts.dropped += 1
        if job.version == job.line.version:
            job.line.give_up()
        if job.done is not None and not job.done.done():
            job.done.set_exception(error)

    async def _collect_sometimes(self) -> None:
        if self._since_collected < COLLECT_EVERY:
            return
        self._since_collected = 0
        with contextlib.suppress(StoreBusyError):
            await self.collect()

    async def _use_again(self, job: Reuse) -> None:
        """Let a cut live on as one that was used just now, or for a better reason."""
        hold = self._lineages.hold_of(job.cut_id or job.line_cut_id)
        if hold is None:
            return
        now = int(time.time())
        # A turn end is kept longest; what somebody asked for stays what it is.
        better = job.kind is HoldKind.TURN and hold.kind in (HoldKind.CADENCE, HoldKind.PROMPT)
        if now - hold.stamp < USED_AGAIN_S and not better:
            return
        kind = HoldKind.TURN if better else hold.kind
        again = Hold(now, hold.position, hold.lineage, kind, hold.cut_id)
        await self.pace.off_loop(hold_cut, self._store, again, tools(self._budget))
        self._lineages.add(again)
