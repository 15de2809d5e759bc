"""Which cuts belong to one growing text, so that a collector keeps the right ones of each.

Retention counts by lineage: the newest cut, the last turn ends, some early ones. So a text that
goes on from the tip of a lineage stays in it, and one that forks further back is a lineage of its
own: forty chats under one system prompt must not push one another's turn ends out.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvpack.store import Hold
from kvpack.store.names import LINEAGE_BYTES

if TYPE_CHECKING:
    from node.binding import PackBinding

_RANDOM_BYTES: Final = 12


def new_lineage(binding: PackBinding) -> bytes:
    """A lineage of no session: 12 random bytes, and 4 by which it is known again as one."""
    return _tagged(binding, secrets.token_bytes(_RANDOM_BYTES))


def is_text(binding: PackBinding, lineage: bytes) -> bool:
    """Whether :func:`new_lineage` made it. A session's lineage nobody but the session grows."""
    return lineage == _tagged(binding, lineage[:_RANDOM_BYTES])


def _tagged(binding: PackBinding, drawn: bytes) -> bytes:
    tag = binding.key.subkey("text-lineage", drawn)
    return (drawn + tag)[:LINEAGE_BYTES]


@dataclass(frozen=True, slots=True)
class _Tip:
    position: int
    cut_id: bytes


class Lineages:
    """What is known of the holds in the store. Bounded by their number; loaded again as they go."""

    def __init__(self) -> None:
        self._holds: dict[bytes, Hold] = {}
        self._tips: dict[bytes, _Tip] = {}
        self._taken: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._holds)

    def load(self, holds: Iterable[Hold]) -> None:
        """Take what lies in the store for all there is."""
        self._holds.clear()
        self._tips.clear()
        for hold in holds:
            self.add(hold)

    def add(self, hold: Hold) -> None:
        """A cut is held."""
        known = self._holds.get(hold.cut_id)
        if known is None or known.stamp <= hold.stamp:
            self._holds[hold.cut_id] = hold
        tip = self._tips.get(hold.lineage)
        if tip is None or tip.position <= hold.position:
            self._tips[hold.lineage] = _Tip(hold.position, hold.cut_id)

    def plan(self, lineage: bytes, position: int) -> None:
        """A cut of the lineage is under way: no shallower one is its tip any more."""
        tip = self._tips.get(lineage)
        if tip is None or tip.position < position:
            self._tips[lineage] = _Tip(position, b"")

    def hold_of(self, cut_id: bytes) -> Hold | None:
        """The newest hold of a cut."""
        return self._holds.get(cut_id)

    def tip_of(self, cut_id: bytes) -> bytes:
        """The deepest cut of the lineage that a cut is of; empty where that is not known."""
        hold = self._holds.get(cut_id)
        tip = None if hold is None else self._tips.get(hold.lineage)
        return b"" if tip is None else tip.cut_id

    def going_on_from(self, binding: PackBinding, cut_id: bytes) -> bytes:
        """The lineage whose tip the cut is; empty: whoever goes on from it forks."""
        hold = self._holds.get(cut_id)
        if hold is None or not is_text(binding, hold.lineage):
            return b""
        tip = self._tips.get(hold.lineage)
        return hold.lineage if tip is not None and tip.cut_id == cut_id else b""

    def take(self, binding: PackBinding, wanted: bytes) -> bytes:
        """``wanted``, if nobody else grows it; else a new lineage. Give it back in the end."""
        lineage = wanted
        if not lineage or lineage in self._taken:
            lineage = new_lineage(binding)
        self._taken.add(lineage)
        return lineage

    def give_back(self, lineage: bytes) -> None:
        """It grows no more."""
        self._taken.discard(lineage)
