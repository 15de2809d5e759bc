"""What the slots look like at one moment, for pages and metrics: no text, no tokens, no names."""

from __future__ import annotations

from dataclasses import dataclass

from node.serving.health import HealthState
from node.serving.slots import Slot, SlotState


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot.

    Attributes:
        index: Its number.
        state: What it does.
        known_tokens: Of the context in it, the answer's or the one it still holds.
        computed_tokens: Of these, those whose rows are there.
        prompt_tokens: Of the answer that is made; 0 where none is.
        generated_tokens: Of that answer, so far.
        in_session: Whether that answer goes on in a session.
        running_s: Seconds since it got the slot; 0 where none is made.
    """

    index: int
    state: SlotState
    known_tokens: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    in_session: bool = False
    running_s: float = 0.0

    @classmethod
    def of(cls, slot: Slot, now_s: float) -> SlotView:
        """What ``slot`` looks like; ``now_s`` by ``time.monotonic``."""
        held = slot.held.stream if slot.held is not None else None
        stream, run = slot.stream or held, slot.run
        known, computed = (0, 0) if stream is None else (stream.next_index, stream.position)
        if run is None:
            return cls(slot.index, slot.state, known, computed)
        prompt = len(run.order.token_ids)
        return cls(
            slot.index, slot.state, known, computed, prompt,
            generated_tokens=max(0, known - prompt) if slot.stream is not None else 0,
            in_session=run.order.session is not None,
            running_s=now_s - (run.started_s or now_s),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FloorView:
    """All slots, and who waits.

    Attributes:
        health: The node's word.
        why: Why it is unhealthy; else empty.
        slots: One each.
        waiting: Answers without a slot.
        waiting_max: As many may be.
        staging: Whether a context is computed, or waits to be, beside the live ones.
    """

    health: HealthState
    why: str
    slots: tuple[SlotView, ...]
    waiting: int
    waiting_max: int
    staging: bool
