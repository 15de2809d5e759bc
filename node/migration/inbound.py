"""One transfer on its target: where it stands, what it holds, what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvpack.errors import KvpackError
from node.directory import OwnershipToken
from node.engine_thread import EngineThread
from node.errors import InventoryError, ProbeError, TransferStateError
from node.migration.messages import Inventory, Offer
from node.migration.receiver import Receiver
from node.migration.table import (
    TARGET,
    TARGET_ENDED,
    Machine,
    TargetEffect,
    TargetEvent,
    TargetState,
)
from node.migration.timeline import TargetTimes
from node.session import Decoded, Session

if TYPE_CHECKING:
    from engine import Logits

#: Ends a stream from its target's end, without waiting for anybody.
HangUp = Callable[[], None]


@dataclass(frozen=True, slots=True, repr=False)
class Outcome:
    """What a commit answers.

    Attributes:
        token: What this node owns the session by.
        first: The first token after the hand-over.
        exact: Numerics are equal and the probe agreed; otherwise the continuation is compatible.
        drift: Largest absolute difference between the two ends' boundary logits.
        times: How long the steps took here.
    """

    token: OwnershipToken
    first: Decoded
    exact: bool
    drift: float
    times: TargetTimes


class Inbound:
    """One transfer. Whoever steps it holds its lock, but for the stream's own bookkeeping.

    Attributes:
        offer: What Prepare said.
        base: The token from which the commit's compare-and-swap starts: the source's in a move,
            this node's own claim in a copy.
        minor: The version of the protocol that both ends speak in it.
    """

    def __init__(
        self,
        offer: Offer,
        base: OwnershipToken,
        receiver: Receiver,
        spool: Path,
        exact: bool,
        minor: int,
    ) -> None:
        self.offer = offer
        self.minor = minor
        self.base = base
        self.receiver = receiver
        self.lock = asyncio.Lock()
        self.inventory: Inventory | None = None
        self.failure: KvpackError | None = None
        self.token: OwnershipToken | None = None
        self.exact = exact
        self._spool = spool
        self._machine = Machine(TARGET, TargetState.NONE)
        self._session: Session | None = None
        self._first: Decoded | None = None
        self._drift = 0.0
        self._seconds: dict[TargetEffect, float] = {}
        self._stream = 0
        self._streaming = False
        self._plain = False
        self._hang_up: HangUp | None = None
        self._progress_s = time.monotonic()

    @property
    def state(self) -> TargetState:
        """Where the transfer stands."""
        return self._machine.state

    def permits(self, event: TargetEvent) -> bool:
        """Whether ``event`` may happen now."""
        return self._machine.permits(event)

    def require(self, event: TargetEvent) -> None:
        """Raise what :meth:`step` would raise, but change nothing.

        Raises:
            TransferStateError: ``event`` is refused now.
        """
        if not self.permits(event):
            raise TransferStateError(f"{event.value}: refused in state {self.state.value}")

    def step(self, event: TargetEvent) -> TargetEffect:
        """Let ``event`` happen; gives the effect to perform. With the transfer ends its stream.

        Raises:
            TransferStateError: ``event`` is refused now.
        """
        effect = self._machine.on(event)
        self._progress_s = time.monotonic()
        if self.state in TARGET_ENDED:
            self._close_stream()
        return effect

    def idle_s(self) -> float:
        """Seconds since anything happened."""
        return time.monotonic() - self._progress_s

    @property
    def is_streaming(self) -> bool:
        """Whether a stream is open."""
        return self._streaming

    @property
    def is_plain(self) -> bool:
        """Whether the last stream came over a wire that strangers may write on."""
        return self._plain

    @contextlib.contextmanager
    def stream(self, hang_up: HangUp | None = None) -> Iterator[int]:
        """Be the one open stream; gives its number.

        Args:
            hang_up: Of a stream beside mTLS. Called when nothing more is taken from it.

        Raises:
            TransferStateError: Another one is open.
        """
        self.require_no_stream()
        self._stream += 1
        self._streaming, self._plain, self._hang_up = True, hang_up is not None, hang_up
        mine = self._stream
        try:
            yield mine
        finally:
            if self._stream == mine:
                self._streaming, self._hang_up = False, None
                # From here on the lease counts.
                self._progress_s = time.monotonic()

    def end_stream(self) -> None:
        """Take no more from the stream that is open: its source has begun to speak anew."""
        self._stream += 1
        self._streaming = False
        self._close_stream()

    def _close_stream(self) -> None:
        hang_up, self._hang_up = self._hang_up, None
        if hang_up is not None:
            hang_up()

    def require_stream(self, number: int) -> None:
        """Raise unless stream ``number`` is the open one.

        Raises:
            TransferStateError: It was ended by a later Prepare.
        """
        if number != self._stream:
            raise TransferStateError("this stream was ended by a later Prepare")

    def require_no_stream(self) -> None:
        """Raise unless no stream is open.

        Raises:
            TransferStateError: One is.
        """
        if self._streaming:
            raise TransferStateError("a stream of this transfer is open")

    def require_same(self, inventory: Inventory) -> None:
        """Raise unless ``inventory`` is the one that was accepted.

        Raises:
            InventoryError: It is another.
        """
        if self.inventory is None or inventory.digest != self.inventory.digest:
            raise InventoryError("sealed before, with another inventory")

    async def accept(self, inventory: Inventory, vocab_size: int) -> None:
        """Gate what arrived; on success the detached session stands ready.

        Raises:
            KvpackError: The gate refuses.
        """
        if not self.exact and not inventory.boundary_logits:
            raise InventoryError("numerics differ, and no boundary logits were sent")
        arrived = await self.receiver.seal(inventory)
        # The token is replaced at the swap by the one that the directory gives.
        session = Session(
            self.offer.session_id, self.base, arrived.generation, arrived.token_ids, vocab_size,
            arrived.decoding,
        )  # fmt: skip
        session.restore(arrived.state)
        self._session = session
        self.inventory = inventory

    async def probe(self, engine: EngineThread, *, keep: bool = True) -> None:
        """Make the boundary call in the detached generation and compare it with the source's.

        Args:
            engine: Where it is made.
            keep: Its logits become the session's next; otherwise it is taken back: whoever gets
                the rows makes it himself, and chooses by his own sampler.

        Raises:
            ProbeError: Numerics are equal, yet the logits differ.
        """
        if self._session is None or self.inventory is None:
            raise RuntimeError("probing before the seal")
        if keep:
            first = await engine.call(self._session.decode_next)
        else:
            first = await engine.call(_try_boundary, self._session)
        if first.logits is None:
            raise RuntimeError("a boundary call without logits")
        agrees = first.logits.digest() == self.inventory.boundary_digest
        if self.exact and not agrees:
            raise ProbeError("the boundary call gave other logits than on the source")
        if not agrees:
            sealed = self.inventory.boundary_logits
            self._drift = drift(first.logits, self.receiver.read_logits(sealed))
        self._first = first

    def took(self, effect: TargetEffect, seconds: float) -> None:
        """Remember how long an effect took."""
        self._seconds[effect] = self._seconds.get(effect, 0.0) + seconds

    def take_session(self) -> Session:
        """The detached session, now owned by this node."""
        if self._session is None or self.token is None:
            raise RuntimeError("swapping before the compare-and-swap")
        session, self._session = self._session, None
        session.token = self.token
        session.spool = self._spool
        return session

    def forget_session(self) -> None:
        """Free the detached generation."""
        self._session = None

    def require_failure(self) -> KvpackError:
        """What ended the transfer."""
        return self.failure or TransferStateError(f"ended as {self.state.value}")

    def answer(self) -> Outcome:
        """What the commit came to.

        Raises:
            KvpackError: It did not come about, or nobody knows yet.
        """
        if self.state is not TargetState.COMMITTED or self.token is None or self._first is None:
            raise self.require_failure()
        seconds = self._seconds.get
        transfer_s = seconds(TargetEffect.TRANSFER, 0.0) + seconds(TargetEffect.SETTLE, 0.0)
        times = TargetTimes(
            probe_s=seconds(TargetEffect.PROBE, 0.0),
            durable_s=seconds(TargetEffect.PUBLISH, 0.0),
            transfer_s=transfer_s,
            swap_s=seconds(TargetEffect.SWAP, 0.0),
        )
        return Outcome(self.token, self._first, self.exact, self._drift, times)


def _try_boundary(session: Session) -> Decoded:
    """What the boundary call gives, taken back again: afterwards all bytes are as before."""
    with session.generation.checkpoint(1):
        logits = session.generation.step(session.token_ids[-1])
    return Decoded(session.next_index, logits.argmax(), logits)


def drift(ours: Logits, theirs: bytes) -> float:
    """Largest absolute difference of two sets of logits of one encoding.

    Raises:
        LayoutMismatchError: Not whole elements.
        InventoryError: Another number of them.
    """
    from engine import Logits

    other = Logits(ours.encoding, theirs)
    if len(other.data) != len(ours.data):
        raise InventoryError(f"expected {len(ours.data)} bytes of logits, found {len(theirs)}")
    return float(abs(ours.values() - other.values()).max())
