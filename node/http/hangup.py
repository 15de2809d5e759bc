"""Noticing that a client has gone: what it asked for is then worth nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from starlette.types import Receive

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client has closed its connection: nobody is left to be told anything."""


async def gone(receive: Receive) -> None:
    """Return once the client has gone. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of ``work``, which is cancelled if the client goes before.

    Raises:
        ClientGone: It did.
    """
    working: asyncio.Future[_T] = asyncio.ensure_future(work)
    async with watching(receive) as leaving:
        try:
            both: set[asyncio.Future[Any]] = {working, leaving}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientGone
        finally:
            await stopped(working)


@contextlib.asynccontextmanager
async def watching(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client goes; it is stopped with the block."""
    leaving = asyncio.create_task(gone(receive))
    try:
        yield leaving
    finally:
        await stopped(leaving)


async def stopped(task: asyncio.Future[_T]) -> None:
    """Cancel ``task`` unless it is done, and wait for its end, whatever that is."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        # Looked at here: an error that nobody asks for would be reported as lost.
        task.exception()
