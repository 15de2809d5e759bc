"""The one thread on which a model is loaded and every call into it runs.

MLX binds its streams to the thread that made them, so the thread is part of the model. Callers
wait in line; the line has a bound, and who finds it full is told so at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from node.errors import NodeBusyError
from node.pace import Pace

if TYPE_CHECKING:
    from engine import Model

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Calls that may wait for the engine at once.
WAITING_CALLS_MAX: Final = 64


class EngineThread:
    """Owns the thread and the model. ``call`` is the only way in.

    Attributes:
        model: What runs on it.
        pace: Who waits for whom, where several compute.
        failed: Told on the event loop of each call that ended with an error, whoever made it and
            whether or not it still waits; None: nobody.
    """

    def __init__(self, executor: ThreadPoolExecutor, model: Model) -> None:
        self._executor = executor
        self._line: set[Future[Any]] = set()
        self._left = asyncio.Event()
        self.model = model
        self.pace = Pace()
        self.failed: Callable[[BaseException], None] | None = None

    @classmethod
    async def load(
        cls, model_dir: Path, chat_template: str | None = None, device: str | None = None
    ) -> EngineThread:
        """Start the thread and load the model on it.

        Args:
            model_dir: Its folder.
            chat_template: Jinja text in the place of the folder's own template.
            device: ``cpu`` or ``gpu``; None: what MLX takes by itself.

        Raises:
            BackendError: There is no such device.
            ModelFolderError: The folder lacks something; the message names it.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        try:
            loop = asyncio.get_running_loop()
            model = await loop.run_in_executor(executor, _load, model_dir, chat_template, device)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(executor, model)

    async def call(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run ``work`` on the engine thread.

        A caller that is cancelled meanwhile stops waiting; ``work`` still runs to its end. So
        whatever ``work`` changes together it must change within this one call, and who measures
        what it changes waits for :meth:`passed` first.

        Raises:
            NodeBusyError: Too many calls wait already.
        """
        return await self.submit(work, *args, **kwargs)

    def submit(
        self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> asyncio.Future[_T]:
        """As :meth:`call`, at once: the work stands in the line when this returns.

        Raises:
            NodeBusyError: Too many calls wait already.
        """
        if len(self._line) >= WAITING_CALLS_MAX:
            raise NodeBusyError(f"{len(self._line)} calls wait for the engine")
        loop = asyncio.get_running_loop()
        call: asyncio.Future[_T] = loop.create_future()
        future = self._executor.submit(work, *args, **kwargs)
        self._line.add(future)
        # A caller that leaves takes its work out of the line, unless it runs already.
        call.add_done_callback(lambda _: future.cancel())
        # One message to the loop for each call: there is one for each token.
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._over, done, call))
        return call

    async def passed(self) -> None:
        """Return when no call that stands in the line now is left, also where this is cancelled."""
        standing = set(self._line)
        cancelled = False
        while standing & self._line:
            self._left.clear()
            try:
                await self._left.wait()
            except asyncio.CancelledError:
                # What was begun is under way all the same, and soon over.
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def close(self) -> None:
        """Let running work end and stop the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _over(self, done: Future[_T], call: asyncio.Future[_T]) -> None:
        """A call has left the line. Its caller, if it still waits, is told last."""
        self._line.discard(done)
        self._left.set()
        if done.cancelled():
            call.cancel()
            return
        error = done.exception()
        if error is not None and self.failed is not None:
            self.failed(error)
        if call.done():
            return
        if error is None:
            call.set_result(done.result())
        else:
            call.set_exception(error)


def import_engine() -> None:
    """Import all that loading a model takes, which may be done before, on any thread."""
    from engine import load_model  # noqa: F401


def _load(model_dir: Path, chat_template: str | None, device: str | None) -> Model:
    from engine import backend, load_model

    if device is not None:
        backend.use_device(device)
    return load_model(model_dir, chat_template=chat_template)
