"""Contenders in turns. One that fails is reported as failed, and the others go on."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.machine import Busy
from bench.measured import FAILED, NOT_THERE_YET, Contender, Sample
from kvpack.errors import KvpackError


class NoFigureError(Exception):
    """There is no figure to be had; ``status`` is one of :mod:`bench.measured`."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Turn:
    """Something that is done once a round.

    Attributes:
        contenders: Of whom it yields a sample, or does not.
        once: Does it; samples by name.
        before: Done before each time, and not counted.
        warm_ups: Times that are not counted at the beginning.
        rounds_taken: Its contenders have their samples already.
    """

    contenders: Sequence[Contender]
    once: Callable[[], Mapping[str, Sample]]
    before: Callable[[], object] | None = None
    warm_ups: int = 0
    rounds_taken: bool = False


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
    limit_s: float,
    told: Callable[[], object] = lambda: None,
) -> None:
    """Do each ``rounds`` times, at least three as long as ``limit_s`` are not over twice.

    Who begins changes from round to round. ``told`` is called after each round.
    """
    start = time.monotonic()
    living = [turn for turn in turns if not turn.rounds_taken]
    for turn in list(living):
        for _ in range(turn.warm_ups):
            if turn in living and _once(turn, None) is None:
                living.remove(turn)
    for number in range(rounds):
        if not living:
            break
        first = number % len(living)
        for turn in living[first:] + living[:first]:
            if _once(turn, number) is None:
                living.remove(turn)
        told()
        passed_s = time.monotonic() - start
        if passed_s > limit_s * (1 if number >= 2 else 2):
            break


def _once(turn: Turn, number: int | None) -> Mapping[str, Sample] | None:
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
        sample = samples.get(contender.name)
        if sample is None:
            contender.status = NOT_THERE_YET
            contender.reason = "not offered by what is measured"
        elif number is not None:
            marked = dataclasses.replace(sample, round=number, alien_cores=alien)
            contender.samples.append(marked)
    return samples


def _failed(turn: Turn, status: str, reason: str) -> None:
    for contender in turn.contenders:
        contender.status, contender.reason = status, " ".join(reason.split())[:400]
        # Half a series would be read as a figure.
        contender.samples.clear()
