"""The places where answers are made, and what each one still holds when its answer is over."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvpack.limits import check_range

if TYPE_CHECKING:
    from node.serving.run import Run
    from node.stream import Stream

#: Each may hold the rows of a whole context.
SLOTS_MAX: Final = 4


class SlotState(enum.Enum):
    """What a slot does."""

    IDLE = "idle"
    BEGIN = "begin"  # what its answer begins from is looked for
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"  # its reader does not read
    LENT = "lent"  # saved, restored or erased from outside


@dataclass(frozen=True, slots=True, repr=False)
class Held:
    """A context that nobody grows at present.

    Attributes:
        tenant: Whose it is, and who alone may go on in it.
        stream: Its tokens and rows; in it its trail.
    """

    tenant: str
    stream: Stream

    def fits(self, tenant: str, token_ids: Sequence[int]) -> bool:
        """Whether an answer of ``tenant`` may go on in it."""
        return tenant == self.tenant and self.stream.holds_beginning_of(token_ids)

    def let_go(self) -> None:
        """Nobody goes on in it any more."""
        if self.stream.trail is not None:
            self.stream.trail.end()


@dataclass(slots=True, repr=False)
class Slot:
    """One place. Belongs to the event loop.

    Attributes:
        index: Its number, from 0.
        state: What it does.
        run: Whose answer is made in it; None: nobody's.
        held: The context of the last answer; None: nothing. Away while an answer goes on in it.
        stream: What the present answer computes; None between answers.
        used: Grows with every use: the smallest was used longest ago.
    """

    index: int
    state: SlotState = SlotState.IDLE
    run: Run | None = None
    held: Held | None = None
    stream: Stream | None = None
    used: int = 0

    @property
    def is_free(self) -> bool:
        """Whether an answer may be made in it."""
        return self.state is SlotState.IDLE

    def take_held(self) -> Held | None:
        """What it holds, which it does not from here on."""
        held, self.held = self.held, None
        return held

    def hold(self, held: Held | None) -> None:
        """Hold this instead of what it held."""
        before, self.held = self.held, held
        if before is not None:
            before.let_go()


@dataclass(slots=True, repr=False)
class Slots:
    """All of them.

    Raises:
        LimitError: There are none, or too many.
    """

    count: int
    all: list[Slot] = field(init=False)
    _uses: int = 0

    def __post_init__(self) -> None:
        check_range("slots", self.count, 1, SLOTS_MAX)
        self.all = [Slot(index) for index in range(self.count)]

    def choose(self, tenant: str, token_ids: Sequence[int]) -> Slot | None:
        """The free slot that an answer should be made in; None: all are taken.

        The one that holds most of it; else an empty one; else the one used longest ago.
        """
        free = [slot for slot in self.all if slot.is_free]
        if not free:
            return None
        chosen = min(free, key=lambda slot: _rank(slot, tenant, token_ids))
        self._uses += 1
        chosen.used = self._uses
        return chosen

    def choose_any(self) -> Slot | None:
        """The free slot whose context will be missed least; None: all are taken.

        For an answer that brings its own context with it: the slot keeps what it holds.
        """
        free = [slot for slot in self.all if slot.is_free]
        return min(free, key=lambda slot: (slot.held is not None, slot.used), default=None)


def _rank(slot: Slot, tenant: str, token_ids: Sequence[int]) -> tuple[int, bool, int]:
    held = slot.held
    depth = held.stream.position if held is not None and held.fits(tenant, token_ids) else 0
    return -depth, held is not None, slot.used
