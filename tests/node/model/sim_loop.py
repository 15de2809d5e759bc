"""An event loop whose time is virtual, and tasks that know which process they belong to.

Nothing waits for real: where every task sleeps, the clock jumps to the first that wakes. What
the product does on threads is done in line. So a run is a function of its seed, and a lease of a
minute costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import pathlib
import selectors
import sqlite3
import types
import weakref

from node import database, fault_points
from node.migration import feed, inbound, source


class Dead(asyncio.CancelledError):
    """The process that runs this is gone: nothing after it happens, no cleaning up either."""


class Process:
    """One life of one node: from its start to its crash."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: weakref.WeakSet[asyncio.Task] = weakref.WeakSet()

    def check(self) -> None:
        if not self.alive:
            raise Dead(f"{self.name} crashed")


#: The process on whose behalf code runs; None for the surroundings.
CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def check_alive() -> None:
    """Stop here if the process whose code this is has crashed."""
    process = CURRENT.get()
    if process is not None:
        process.check()


class _Jumping(selectors.SelectSelector):
    """Never blocks: what would be waited for is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("everything waits, and nothing will ever come")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while nobody has anything to do."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self.set_task_factory(_tagged)
        self.set_exception_handler(lambda *_: None)  # crashed tasks have nobody to tell

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor, func, *args):
        """No threads: done at a turn of its own, if the process that asked still lives then."""
        done = self.create_future()

        def run() -> None:
            if done.done():
                return
            try:
                check_alive()
                done.set_result(func(*args))
            except Dead:
                done.cancel()
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits hears it
                done.set_exception(error)

        self.call_soon(run)
        return done


def _tagged(loop, work, context=None):
    task = asyncio.Task(work, loop=loop, context=context)
    process = CURRENT.get() if context is None else context.get(CURRENT)
    if process is not None:
        process.tasks.add(task)
        if not process.alive:
            loop.call_soon(task.cancel)
    return task


def spawn(process: Process | None, work) -> asyncio.Task:
    """Begin ``work`` on behalf of ``process``."""
    context = contextvars.copy_context()
    context.run(CURRENT.set, process)
    return asyncio.get_running_loop().create_task(work, context=context)


class _Quick(sqlite3.Connection):
    """Transactions without waiting for the disk: processes crash here, the machine does not."""

    def execute(self, statement, *args):
        if statement == "PRAGMA synchronous=FULL":
            statement = "PRAGMA synchronous=OFF"
        return super().execute(statement, *args)


_SQLITE = types.SimpleNamespace(
    **{**vars(sqlite3), "connect": functools.partial(sqlite3.connect, factory=_Quick)}
)


class _Time:
    """Stands in for the ``time`` module where the product measures."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()


@contextlib.contextmanager
def patched(loop: VirtualLoop, reach):
    """Virtual time, no threads, no waiting for disks, ``reach`` at the product's fault points."""
    unlink, to_thread, reached = pathlib.Path.unlink, asyncio.to_thread, fault_points.reach
    fsync = os.fsync
    times = [(module, module.time) for module in (source, inbound, feed)]

    @functools.wraps(unlink)
    def living_unlink(self, missing_ok=False):
        check_alive()
        return unlink(self, missing_ok=missing_ok)

    async def in_line(work, *args, **kwargs):
        await asyncio.sleep(0)
        check_alive()
        return work(*args, **kwargs)

    try:
        pathlib.Path.unlink, asyncio.to_thread, fault_points.reach = living_unlink, in_line, reach
        os.fsync, database.sqlite3 = lambda _: None, _SQLITE
        for module, _ in times:
            module.time = _Time(loop)
        yield
    finally:
        pathlib.Path.unlink, asyncio.to_thread, fault_points.reach = unlink, to_thread, reached
        os.fsync, database.sqlite3 = fsync, sqlite3
        for module, time in times:
            module.time = time
