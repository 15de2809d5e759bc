"""What happened on a node since it began, as plain counters: HTTP answers, refusals, moves.

Slots and ladder count their own (:mod:`node.serving.counts`, :mod:`node.serving.ladder.accounts`).
All of it is additions of integers. Prometheus sees nothing of this before a scrape asks
(:mod:`node.metrics.families`), so no request can fail because of a metric.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final

from node.metrics.histogram import Histogram
from node.metrics.views import MOVES_SHOWN, REFUSALS_SHOWN, Direction, EndedMove, Refusal
from node.migration.timeline import Timeline

#: Distinct words of one label. Words come from classes of this program; a bound costs nothing.
LABELS_MAX: Final = 96
OTHER: Final = "other"

#: Routes that are counted apart: those that compute.
DOORS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
}


class Recorder:
    """Counters of one node. Every method is a few additions on the event loop's thread.

    Attributes:
        refused: By stable word.
        answered: HTTP answers by door and status class.
        answer_s: How long they took, by door.
        moves: Ended moves by (direction, kind, outcome).
        payload_bytes: Of ended moves, by direction.
        held_bytes: Of moves given away: what the target held already.
        wire_bytes: Of moves given away: all messages.
        verify_failures: What did not verify, by where it came from.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.clock_s = clock_s
        self.refused: Counter[str] = Counter({"busy": 0})
        self.answered: Counter[tuple[str, str]] = Counter(
            {(door, "2xx"): 0 for door in sorted({*DOORS.values(), OTHER})}
        )
        self.answer_s = {door: Histogram() for door in sorted({*DOORS.values(), OTHER})}
        self.moves: Counter[tuple[str, str, str]] = Counter(
            {(way.value, "move", "done"): 0 for way in Direction}
        )
        self.payload_bytes: Counter[str] = Counter()
        self.held_bytes = 0
        self.wire_bytes = 0
        self.verify_failures: Counter[str] = Counter({"transfer": 0})
        self.phases: dict[str, Histogram] = {"pause": Histogram()}
        self.last_refusals: deque[Refusal] = deque(maxlen=REFUSALS_SHOWN)
        self.last_moves: deque[EndedMove] = deque(maxlen=MOVES_SHOWN)

    def refuse(self, reason: str) -> None:
        """Something was refused: its stable word."""
        _bounded(self.refused, reason)
        self.last_refusals.append(Refusal(reason, self.clock_s()))

    def answer(self, route: str, status: int, seconds: float) -> None:
        """An HTTP answer is over. ``route`` is one of this program's paths, not the caller's."""
        door = DOORS.get(route, OTHER)
        self.answered[door, f"{status // 100}xx"] += 1
        self.answer_s[door].add(seconds)

    def verify_failed(self, where: str) -> None:
        """Something that was stored or sent did not verify."""
        _bounded(self.verify_failures, where)

    def move_ended(self, move: EndedMove) -> None:
        """A move or copy has ended, well or not."""
        outcome = move.reason or "done"
        kind = "copy" if move.copy else "move"
        _bounded(self.moves, (move.direction.value, kind, outcome))
        self.payload_bytes[move.direction.value] += move.payload_bytes
        self.last_moves.append(move)

    def phase(self, name: str, seconds: float) -> None:
        """A phase of a move took so long. Names are of this program."""
        self.phases.setdefault(name, Histogram()).add(seconds)

    def timed(self, timeline: Timeline, wire_bytes: int, *, copy: bool) -> None:
        """The phases of a move or copy that this node gave away. A copy pauses nobody."""
        self.held_bytes += timeline.held_bytes
        self.wire_bytes += wire_bytes
        target = timeline.target
        for name, seconds in (
            ("stream", timeline.zero_s - timeline.start_s),
            ("tail", timeline.pushed_s - timeline.zero_s),
            ("seal", timeline.sealed_s - timeline.pushed_s),
            ("commit", timeline.committed_s - timeline.sealed_s),
            ("probe", target.probe_s),
            ("durable", target.durable_s),
            ("transfer", target.transfer_s),
            ("swap", target.swap_s),
        ):
            self.phase(name, seconds)
        if not copy:
            self.phase("pause", timeline.exposed_handover_s)


def _bounded(counter: Counter[str] | Counter[tuple[str, str, str]], word: object) -> None:
    """Count ``word``; one that would be too many is counted as another."""
    if word not in counter and len(counter) >= LABELS_MAX:
        word = OTHER if isinstance(word, str) else (OTHER, OTHER, OTHER)
    counter[word] += 1  # type: ignore[index]
