"""What every answer of a floor needs, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.serving.calls import EngineCalls
from node.serving.counts import Counts
from node.serving.reuse import Ladder
from node.serving.run import Run

if TYPE_CHECKING:
    from node.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Tools:
    """What every answer needs.

    Attributes:
        call: The engine.
        ladder: Whoever keeps rows.
        sessions: The node's sessions; None: this node has none.
        token_bytes: The bytes that a token stands for in text.
        counts: What is counted.
        stall_s: How long an answer that is not read keeps its slot, in seconds.
        staged: Called when a staging generation is needed no more.
    """

    call: EngineCalls
    ladder: Ladder
    sessions: Sessions | None
    token_bytes: Callable[[int], bytes]
    counts: Counts
    stall_s: float
    staged: Callable[[Run], None]
