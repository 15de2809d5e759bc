"""What happened on a node since it began, as plain counters.

Whoever serves a request tells the recorder through :class:`Told`, which hands each event to the
loop: it is counted after the caller has gone on, so no request can fail because of a metric.
Prometheus sees nothing of this before a scrape asks (:mod:`node.metrics.families`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from node.metrics.histogram import Histogram
from node.metrics.views import MOVES_SHOWN, REFUSALS_SHOWN, Direction, EndedMove, Refusal
from node.migration.timeline import Timeline
from node.serving.order import FinishReason, MissReason, Rung, RunUsage

#: The time over which a speed is shown, in seconds.
RATE_WINDOW_S: Final = 10.0

#: Distinct words of one label. Words come from classes of this program; a bound costs nothing.
LABELS_MAX: Final = 96
OTHER: Final = "other"

#: Ways to an answer that are counted apart.
DOORS: Final = ("chat", "completions", "responses", "conversations", "other")

#: How an answer ends.
OUTCOMES: Final = (*(reason.value for reason in FinishReason), "cancelled", "failed")


class Recorder:
    """Counters of one node. Every method is a few additions on the event loop's thread.

    Attributes:
        runs: Answers by how they ended: a finish reason, ``cancelled`` or ``failed``.
        prompt_tokens: Of finished answers, by where their rows came from; ``computed`` beside the
            rungs. The sum is what the usage blocks said.
        generated_tokens: Given out.
        lookups: Finished answers by rung.
        misses: The same by why not all was held.
        continuations: Answers that went on in a session's live state.
        remote: Remote prefills by what became of them.
        restored_bytes: Plaintext of rows that were brought back.
        refused: By stable word.
        answered: HTTP answers by door and status class.
        moves: Ended moves by (direction, kind, outcome).
        payload_bytes: Of ended moves, by direction.
        held_bytes: Of moves given away: what the target held already.
        wire_bytes: Of moves given away: all messages.
        verify_failures: What did not verify, by where it came from.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.clock_s = clock_s
        self.runs: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.prompt_tokens: Counter[str] = Counter()
        self.generated_tokens = 0
        self.lookups: Counter[Rung] = Counter()
        self.misses: Counter[MissReason] = Counter()
        self.continuations = 0
        self.remote: Counter[str] = Counter({"fresh": 0, "local": 0})
        self.restored_bytes = 0
        self.refused: Counter[str] = Counter({"busy": 0})
        self.answered: Counter[tuple[str, str]] = Counter({(door, "2xx"): 0 for door in DOORS})
        self.moves: Counter[tuple[str, str, str]] = Counter(
            {(way.value, "move", "done"): 0 for way in Direction}
        )
        self.payload_bytes: Counter[str] = Counter()
        self.held_bytes = 0
        self.wire_bytes = 0
        self.verify_failures: Counter[str] = Counter()
        self.first_token_s = Histogram()
        self.queued_s = Histogram()
        self.phases: dict[str, Histogram] = {"pause": Histogram()}
        self.last_refusals: deque[Refusal] = deque(maxlen=REFUSALS_SHOWN)
        self.last_moves: deque[EndedMove] = deque(maxlen=MOVES_SHOWN)
        self._tokens: deque[tuple[int, int]] = deque(maxlen=round(RATE_WINDOW_S) + 1)

    def token(self, count: int = 1) -> None:
        """So many tokens were given out just now."""
        self.generated_tokens += count
        second = int(self.clock_s())
        if self._tokens and self._tokens[-1][0] == second:
            count += self._tokens.pop()[1]
        self._tokens.append((second, count))

    def tokens_per_s(self) -> float:
        """Tokens given out in the last full seconds, per second."""
        now = int(self.clock_s())
        recent = sum(n for second, n in self._tokens if now - RATE_WINDOW_S <= second < now)
        return recent / RATE_WINDOW_S

    def finished(self, reason: FinishReason, usage: RunUsage, *, session: bool) -> None:
        """An answer came to its end; ``session``: in a session that went on."""
        self.runs[reason.value] += 1
        self.prompt_tokens[usage.rung.value] += usage.cached_tokens
        self.prompt_tokens["computed"] += max(0, usage.prompt_tokens - usage.cached_tokens)
        self.lookups[usage.rung] += 1
        self.misses[usage.miss] += 1
        self.continuations += session
        self.restored_bytes += usage.restored_bytes
        self.first_token_s.add(usage.first_token_s)
        self.queued_s.add(usage.queued_s)

    def ended(self, outcome: str) -> None:
        """An answer was ``cancelled`` or ``failed``."""
        self.runs[outcome] += 1

    def prefilled_remotely(self, outcome: str) -> None:
        """A remote prefill was ``fresh``, or ``local`` after all."""
        self.remote[outcome] += 1

    def refuse(self, reason: str) -> None:
        """Something was refused: its stable word."""
        _bounded(self.refused, reason)
        self.last_refusals.append(Refusal(reason, self.clock_s()))

    def answer(self, door: str, status: int) -> None:
        """An HTTP answer began."""
        self.answered[(door if door in DOORS else OTHER, f"{status // 100}xx")] += 1

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


class Told:
    """The way from a request to its counters: an error there is the loop's, never the request's."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def token(self, count: int = 1) -> None:
        """See :meth:`Recorder.token`."""
        _soon(self.recorder.token, count)

    def finished(self, reason: FinishReason, usage: RunUsage, *, session: bool = False) -> None:
        """See :meth:`Recorder.finished`."""
        recorder = self.recorder
        _soon(lambda: recorder.finished(reason, usage, session=session))

    def ended(self, outcome: str) -> None:
        """See :meth:`Recorder.ended`."""
        _soon(self.recorder.ended, outcome)

    def prefilled_remotely(self, outcome: str) -> None:
        """See :meth:`Recorder.prefilled_remotely`."""
        _soon(self.recorder.prefilled_remotely, outcome)

    def refuse(self, reason: str) -> None:
        """See :meth:`Recorder.refuse`."""
        _soon(self.recorder.refuse, reason)

    def answer(self, door: str, status: int) -> None:
        """See :meth:`Recorder.answer`."""
        _soon(self.recorder.answer, door, status)

    def verify_failed(self, where: str) -> None:
        """See :meth:`Recorder.verify_failed`."""
        _soon(self.recorder.verify_failed, where)


def _soon(count: Callable[..., None], *what: object) -> None:
    asyncio.get_running_loop().call_soon(count, *what)


def _bounded(counter: Counter[str] | Counter[tuple[str, str, str]], word: object) -> None:
    """Count ``word``; one that would be too many is counted as another."""
    if word not in counter and len(counter) >= LABELS_MAX:
        word = OTHER if isinstance(word, str) else (OTHER, OTHER, OTHER)
    counter[word] += 1  # type: ignore[index]
