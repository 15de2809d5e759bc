"""Jobs on several threads whose results, and whose first error, come in the order of the jobs.

Hash and cipher let other threads run. A chunk that is sealed is one job. Chunks that are verified
are taken some at a time: each is read, decrypted and hashed in pieces in the cache of one core,
and nothing but the verdict leaves it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NoReturn, TypeVar

from kvpack.errors import KvpackError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Each thread may hold one compressed chunk of the largest size and what it becomes, 20 MiB in all:
#: more threads would break the promise of 64 MiB for a verification or a save.
THREADS_MAX: Final = 2

#: Jobs in hand or done and not yet taken, for each thread: of a writer each is a sealed chunk.
_IN_HAND_MAX: Final = 1

#: Below this the threads would take longer to start than they save.
_WORTH_BYTES: Final = 8 << 20


def thread_count(asked: int | None, total_bytes: int) -> int:
    """How many threads do ``total_bytes`` of work: as asked, or as many as there are cores for it.

    Args:
        asked: 1 to ``THREADS_MAX``, or None.
        total_bytes: How much there is to do.
    """
    if asked is not None:
        return max(1, min(asked, THREADS_MAX))
    if total_bytes < _WORTH_BYTES:
        return 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(usable or 1, THREADS_MAX))


def group_bytes(total_bytes: int) -> int:
    """How much of ``total_bytes`` one job does: every job costs threads a look at each other."""
    return min(_WORTH_BYTES, total_bytes // (8 * THREADS_MAX))


def grouped(
    items: Iterable[_Item], bytes_of: Callable[[_Item], int], bytes_min: int
) -> Iterator[list[_Item]]:
    """``items`` in their order, in groups of at least ``bytes_min`` but for the last.

    Raises:
        KvpackError: Of what makes the items, after the group of those before it; also OSError.
    """
    group: list[_Item] = []
    held_bytes = 0
    try:
        for item in items:
            group.append(item)
            held_bytes += bytes_of(item)
            if held_bytes >= bytes_min:
                yield group
                group, held_bytes = [], 0
    except (KvpackError, OSError):
        if group:
            yield group
        raise
    if group:
        yield group


def in_order(jobs: Iterable[Callable[[], _Result]], threads: int) -> Generator[_Result, None, None]:
    """The results of ``jobs`` in their order. An iterator to close: it ends its threads then.

    What makes the jobs runs in the caller's thread. Whoever reads one job after the other meets the
    same error: of several the first in the order of the jobs counts, and an error of what makes
    them counts after those of the jobs before it.

    Raises:
        KvpackError: Of a job, or of what makes them; also OSError.
    """
    if threads == 1:
        for job in jobs:
            yield job()
        return
    pending: deque[Future[_Result]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for job in _with_error_as_job(jobs):
            pending.append(pool.submit(job))
            if len(pending) > _IN_HAND_MAX * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _with_error_as_job(
    jobs: Iterable[Callable[[], _Result]],
) -> Iterator[Callable[[], _Result]]:
    try:
        yield from jobs
    except (KvpackError, OSError) as error:
        yield functools.partial(_raise, error)


def _raise(error: BaseException) -> NoReturn:
    raise error


def verdict_of_all(
    jobs: Iterable[Callable[[], int]], threads: int, progress: Callable[[int], None] | None = None
) -> None:
    """Do ``jobs``, of which nothing comes but that they raise; the caller's thread does its share.

    Each thread takes the next job when it is done with one: nobody waits for a thread that gives
    them out, which would have to be woken and to get a core first. The error is the one that
    :func:`in_order` raises.

    Args:
        jobs: What is to be done; each says how much it was.
        threads: By how many, the caller's included.
        progress: Told, in the caller's thread, how much more is done.

    Raises:
        KvpackError: Of a job, or of what makes them; also OSError.
    """
    shared = _Verdicts(jobs)
    if threads == 1:
        shared.work(progress)
    else:
        with ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(shared.work) for _ in range(threads - 1)]
            try:
                shared.work(progress)
            finally:
                shared.stop()
            for other in others:
                other.result()
    shared.finish(progress)


class _Verdicts:
    """Jobs that several threads take in their order, and the first of them that failed."""

    def __init__(self, jobs: Iterable[Callable[[], int]]) -> None:
        self._jobs = enumerate(_with_error_as_job(jobs))
        self._lock = threading.Lock()
        self._stopped = False
        self._untold = 0
        self._failed: tuple[int, KvpackError | OSError] | None = None

    def stop(self) -> None:
        """Let no thread take another job."""
        self._stopped = True

    def work(self, progress: Callable[[int], None] | None = None) -> None:
        """Take jobs until there are none, or one failed in any thread, whatever it raised."""
        while (taken := self._take()) is not None:
            number, job = taken
            try:
                done = job()
            except (KvpackError, OSError) as error:
                self._fail(number, error)
                return
            except BaseException:
                # Of a job's own: a caller may give what runs out of memory, or has a fault.
                self.stop()
                raise
            self._tell(done, progress)

    def finish(self, progress: Callable[[int], None] | None) -> None:
        """After all threads: tell the rest, or raise the error."""
        # All jobs before one that was taken were taken too, and done: the first error is the first.
        if self._failed is not None:
            raise self._failed[1]
        self._tell(0, progress)

    def _take(self) -> tuple[int, Callable[[], int]] | None:
        with self._lock:
            return None if self._stopped else next(self._jobs, None)

    def _fail(self, number: int, error: KvpackError | OSError) -> None:
        with self._lock:
            self._stopped = True
            if self._failed is None or number < self._failed[0]:
                self._failed = number, error

    def _tell(self, done: int, progress: Callable[[int], None] | None) -> None:
        with self._lock:
            self._untold += done
            if progress is None:
                return
            told, self._untold = self._untold, 0
        if told:
            progress(told)
