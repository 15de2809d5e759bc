"""Jobs on several threads whose results, and whose first error, come in the order of the jobs.

Hash and cipher let other threads run. A chunk is one job. To verify it, it is read, decrypted and
hashed piece by piece in the cache of one core, and nothing but the verdict leaves it.
"""

from __future__ import annotations

import functools
import os
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
    try:
        for item in items:
            group.append(item)
            if sum(map(bytes_of, group)) >= bytes_min:
                yield group
                group = []
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
