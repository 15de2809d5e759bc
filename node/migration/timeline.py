"""What a move cost, on the source's clock. Values, and arithmetic on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpack.chunk import ChunkClass, ChunkReference


@dataclass(frozen=True, slots=True)
class Sent:
    """One chunk that was handed to the wire: when, what, and how much plaintext it holds."""

    at_s: float
    chunk_class: ChunkClass
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class TargetTimes:
    """Durations of the commit's steps, on the target's clock."""

    probe_s: float = 0.0
    durable_s: float = 0.0
    transfer_s: float = 0.0
    swap_s: float = 0.0


@dataclass(slots=True)
class Timeline:
    """Filled while a move runs. All moments are ``time.monotonic()`` of the source.

    Attributes:
        start_s: The move began.
        zero_s: The last prefill call returned; for a session without backlog, its freeze.
        boundary_s: The source's own boundary call returned.
        pushed_s: Every chunk was written and the target acknowledged their number.
        sealed_s: The target accepted the inventory.
        committed_s: The first token arrived here.
        sent: Every chunk, in order; what was lost with a cut link and sent again is here twice.
        held_bytes: Plaintext of chunks that the target held and was only told of.
        resumed: How often the stream was opened again.
        target: What the target measured.
        payload_bytes: Plaintext bytes sent in all.
    """

    start_s: float
    zero_s: float = 0.0
    boundary_s: float = 0.0
    pushed_s: float = 0.0
    sealed_s: float = 0.0
    committed_s: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    held_bytes: int = 0
    resumed: int = 0
    target: TargetTimes = TargetTimes()
    payload_bytes: int = 0

    def add(self, at_s: float, reference: ChunkReference) -> None:
        """A chunk was sent."""
        self.sent.append(Sent(at_s, reference.chunk_class, reference.plain_bytes))
        self.payload_bytes += reference.plain_bytes

    def held(self, reference: ChunkReference) -> None:
        """A chunk was named, not sent."""
        self.held_bytes += reference.plain_bytes

    def bytes_of(self, *classes: ChunkClass) -> int:
        """Plaintext bytes sent of ``classes``."""
        return sum(one.plain_bytes for one in self.sent if one.chunk_class in classes)

    @property
    def payload_bytes_after_zero(self) -> int:
        """Plaintext bytes handed to the wire after zero: what did not hide behind prefill."""
        return sum(one.plain_bytes for one in self.sent if one.at_s > self.zero_s)

    @property
    def hidden_fraction(self) -> float:
        """Share of the payload that was sent before zero."""
        return 1.0 - self.payload_bytes_after_zero / max(1, self.payload_bytes)

    @property
    def exposed_handover_s(self) -> float:
        """From zero to the first token's arrival at the source."""
        return self.committed_s - self.zero_s
