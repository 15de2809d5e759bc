"""Contenders in turns. One that fails is reported as failed, and the others go on."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.machine import Busy
from bench.measured import FAILED, MEASURED, NOT_THERE_YET, TIMED_OUT, Contender, Sample
from bench.verdict import ROUNDS_MIN
from kvpack.errors import KvpackError


class NoFigureError(Exception):
    """There is no figure to be had; ``status`` is one of :mod:`bench.measured`."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


#: What a turn gives: one sample of a contender, or, of something that has rounds of its own, all.
Samples = Mapping[str, Sample | Sequence[Sample]]


@dataclass(frozen=True)
class Turn:
    """Something that is done once a round.

    Attributes:
        contenders: Of whom it yields a sample, or does not.
        once: Does it; samples by name.
        before: Done before each time, and not counted.
        warm_ups: Times that are not counted at the beginning.
        rounds_max: It takes part in so many rounds alone; None: in all.
    """

    contenders: Sequence[Contender]
    once: Callable[[], Samples]
    before: Callable[[], object] | None = None
    warm_ups: int = 0
    rounds_max: int | None = None


def in_process(
    contender: Contender,
    byte_count: int,
    work: Callable[[], object],
    before: Callable[[], object] | None = None,
) -> Turn:
    """A turn that calls ``work`` here and counts all of it. The first call warms up."""

    def once() -> dict[str, Sample]:
        gc.collect()
        gc.disable()
        try:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            work()
            taken_s = time.perf_counter() - wall_s
            return {contender.name: Sample(taken_s, byte_count, time.process_time() - cpu_s)}
        finally:
            gc.enable()

    return Turn([contender], once, before, warm_ups=1)


def take_turns(
    turns: Sequence[Turn],
    rounds: int,
    end_s: float,
    told: Callable[[int], object] = lambda number: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Do each ``rounds`` times, as long as what it took the last time still fits.

    After three rounds another one is begun where a whole one fits. Before, whoever does not fit any
    more is left out, so that the others have theirs; who never had a turn has timed out. Who begins
    changes from round to round.

    Args:
        turns: Who takes part.
        rounds: At most.
        end_s: When all has to be over, by ``clock``.
        told: Called with the round's number after each turn that gave samples.
        clock: Seconds.
    """
    living, took = list(turns), dict.fromkeys(range(len(turns)), 0.0)
    order = {id(turn): number for number, turn in enumerate(turns)}

    def done(turn: Turn, number: int | None) -> bool:
        """Whether it is among the living afterwards."""
        start_s, which = clock(), order[id(turn)]
        if start_s + took[which] > end_s:
            return True
        lives = _once(turn, number) is not None
        took[which] = clock() - start_s
        return lives

    for turn in list(living):
        if not all(done(turn, None) for _ in range(turn.warm_ups)):
            living.remove(turn)
    for number in range(rounds):
        of_round = [turn for turn in living if turn.rounds_max is None or number < turn.rounds_max]
        whole_s = sum(took[order[id(turn)]] for turn in of_round)
        if not of_round or (number >= ROUNDS_MIN and clock() + whole_s > end_s):
            break
        first = number % len(of_round)
        for turn in of_round[first:] + of_round[:first]:
            if not done(turn, number):
                living.remove(turn)
            told(number)
    for turn in living:
        for contender in turn.contenders:
            if not contender.samples and contender.status == MEASURED:
                contender.status = TIMED_OUT
                contender.reason = "no time was left for it"


def _once(turn: Turn, number: int | None) -> Samples | None:
    """One time; None where it failed, which its contenders then say."""
    try:
        if turn.before is not None:
            turn.before()
        busy = Busy.now()
        samples = turn.once()
    except NoFigureError as error:
        return _failed(turn, error.status, str(error))
    except (KvpackError, OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        return _failed(turn, FAILED, f"{type(error).__name__}: {error}")
    except (AssertionError, ImportError, AttributeError, subprocess.SubprocessError) as error:
        return _failed(turn, FAILED, f"{type(error).__name__}: {error}")
    after = Busy.now()
    alien = None if after is None else after.alien_cores(busy)
    for contender in turn.contenders:
        found = samples.get(contender.name)
        if found is None:
            contender.status = NOT_THERE_YET
            contender.reason = "not offered by what is measured"
        elif number is not None:
            one = isinstance(found, Sample)
            several = [dataclasses.replace(found, round=number)] if one else found
            contender.samples += [dataclasses.replace(s, alien_cores=alien) for s in several]
    return samples


def _failed(turn: Turn, status: str, reason: str) -> None:
    for contender in turn.contenders:
        contender.status, contender.reason = status, " ".join(reason.split())[:400]
        # Half a series would be read as a figure.
        contender.samples.clear()
