"""Events over a response that stays open, as browsers and OpenAI's clients read them.

A write waits for a reader only so long: whoever does not read is cut off, and what feeds the
stream is told at once, so no slot works for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from kvpack.errors import KvpackError
from node.http.errors import Refusal, broken, refusal_of
from node.http.hangup import ClientGone, stopped, watching
from node.http.limits import WRITE_S
from node.unexpected import unexpected

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

#: While nothing else is said, a comment is, so that no client or proxy gives up.
PING_S: Final = 5.0

_PING: Final = b": waiting\n\n"
DONE: Final = b"data: [DONE]\n\n"

_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


def event(body: object, name: str | None = None) -> bytes:
    """One event: ``body`` as JSON, under ``name`` if it has one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip."""
    return b": " + text.encode() + b"\n\n"


def error_event(refusal: Refusal) -> bytes:
    """An error inside a stream that has begun: the same body as an answer's."""
    return event(refusal.body)


class EventStream:
    """An ASGI application that sends what a generator gives, until it ends or the client goes.

    Args:
        events: Whole events, already encoded. Closed in every case. A ``KvpackError`` of its own
            becomes an event, made by ``on_error``.
        on_error: Makes the event of a refusal.
        closing: Called in every case, also where the events were never begun.
        headers: Beside those of every stream.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[Refusal], bytes] = error_event,
        closing: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._events = events
        self._on_error = on_error
        self._closing = closing or _nothing
        self._headers = [
            *_HEADERS,
            *((name.lower().encode(), value.encode()) for name, value in (headers or {}).items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head at once, then each event as it comes.

        Raises:
            ClientGone: The client went, or does not read.
        """
        start = {"type": "http.response.start", "status": 200, "headers": self._headers}
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._closing)
            leaving = await stack.enter_async_context(watching(receive))
            # Closed from the outermost in: none is left to the garbage collector.
            events = await stack.enter_async_context(contextlib.aclosing(self._events))
            guarded = await stack.enter_async_context(contextlib.aclosing(self._guarded(events)))
            line = _Line(send)
            await line.write_bounded(start)
            await line.carry(guarded, leaving)
            await line.write_bounded(
                {"type": "http.response.body", "body": b"", "more_body": False}
            )

    async def _guarded(self, events: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The events, and if they end in an error, that as the last one."""
        try:
            async for part in events:
                yield part
        except KvpackError as error:
            log.info("a stream ended: %s", error)
            yield self._on_error(refusal_of(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said and answered
            log.error("a stream failed: %s", unexpected(error))
            yield self._on_error(broken())


class _Line:
    """The way to the reader. One task carries all events: a task for each cost more than the event.

    Whoever made it watches: the reader may go, stop to read, or hear nothing for too long.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._is_writing = False
        # When the write began that is under way, or else the last one ended.
        self._since_s = self._clock()

    async def carry(self, events: AsyncIterator[bytes], leaving: asyncio.Task[None]) -> None:
        """Send the events, and a comment whenever none came for a while.

        Raises:
            ClientGone: ``leaving`` is done, or the client does not read.
        """
        carrying = asyncio.create_task(self._each(events))
        try:
            while not carrying.done():
                limit_s = WRITE_S if self._is_writing else PING_S
                rest_s = self._since_s + limit_s - self._clock()
                if rest_s <= 0:
                    await self._overdue()
                    continue
                # A write that begins meanwhile is not waited for longer than any.
                await asyncio.wait(
                    {carrying, leaving},
                    timeout=min(rest_s, WRITE_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if leaving.done():
                    raise ClientGone
            carrying.result()
        finally:
            await stopped(carrying)

    async def write_bounded(self, message: dict[str, object]) -> None:
        """One write that nobody watches.

        Raises:
            ClientGone: The client does not read.
        """
        try:
            async with asyncio.timeout(WRITE_S):
                await self._write(message)
        except TimeoutError:
            raise _unread() from None

    async def _each(self, events: AsyncIterator[bytes]) -> None:
        async for part in events:
            await self._write(_body(part))

    async def _overdue(self) -> None:
        if self._is_writing:
            raise _unread()
        await self.write_bounded(_body(_PING))

    async def _write(self, message: dict[str, object]) -> None:
        async with self._turn:
            self._is_writing, self._since_s = True, self._clock()
            try:
                await self._send(message)
            finally:
                self._is_writing, self._since_s = False, self._clock()


def _body(part: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": part, "more_body": True}


def _unread() -> ClientGone:
    log.info("a reader did not read for %.0f s: cut off", WRITE_S)
    return ClientGone()


def _nothing() -> None:
    """Nobody is to be told."""
