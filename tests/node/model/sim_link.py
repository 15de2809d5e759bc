"""Links between simulated nodes: the product's own stubs and services over a channel that fails.

A call is lost on its way, answered in vain, doubled, or comes when its caller has given up. A
stream breaks at any piece, and what was under way may still arrive. Everything else is real: the
bytes, the service, its errors with their trailers.
"""

from __future__ import annotations

import asyncio
import types

import grpc
import grpc.aio

from model.sim_loop import check_alive, spawn
from node.migration.wire import SERVICE

#: Pieces under way on a stream.
WINDOW = 4


class Refused(Exception):
    """What a service's ``abort`` ends with, on its way to the caller."""

    def __init__(self, code, details, trailer) -> None:
        super().__init__(details)
        self.error = grpc.aio.AioRpcError(
            code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), details=details
        )


def unavailable() -> grpc.aio.AioRpcError:
    """A failure that no service said anything about."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details="link")


class Context:
    """What a service sees of its caller."""

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self._trailer = ()

    def set_trailing_metadata(self, trailer) -> None:
        self._trailer = trailer

    async def abort(self, code, details="", trailing_metadata=()):
        raise Refused(code, details, self._trailer or trailing_metadata)


class Gate:
    """Admits whoever the link says is calling."""

    def admit(self, method: str, context: Context):
        return types.SimpleNamespace(name=context.caller)


class Link:
    """A channel from one node to another."""

    def __init__(self, sim, caller: str, peer: str) -> None:
        self._sim = sim
        self._caller = caller
        self._peer = peer

    async def close(self) -> None:
        await asyncio.sleep(0)

    def unary_unary(self, path, request_serializer, response_deserializer):
        method = path.removeprefix(f"/{SERVICE}/")

        async def call(request, timeout):
            return response_deserializer(
                await self._call(method, request_serializer(request), timeout)
            )

        return call

    def stream_unary(self, path, request_serializer, response_deserializer):
        def call(timeout):
            return Stream(self._sim, self._caller, self._peer, response_deserializer)

        return call

    async def _call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        sim, chance = self._sim, self._sim.chance
        await sim.pause()
        check_alive()
        if chance("lost"):
            await asyncio.sleep(sim.random.uniform(0.0, 2.0))
            raise unavailable()
        if chance("late"):
            # It arrives when its caller has long given up.
            self._serve_later(method, request, sim.random.uniform(0.5, 20.0))
            await asyncio.sleep(sim.random.uniform(0.0, 3.0))
            raise unavailable()
        if chance("double"):
            self._serve_later(method, request, sim.random.uniform(0.0, 5.0))
        serving = self._serve(method, request)
        if chance("unanswered"):
            await asyncio.sleep(sim.random.uniform(0.0, 3.0))
            raise unavailable()
        try:
            async with asyncio.timeout(timeout_s):
                return await serving
        except TimeoutError:
            raise unavailable() from None

    def _serve_later(self, method: str, request: bytes, delay_s: float) -> None:
        async def later() -> None:
            await asyncio.sleep(delay_s)
            await asyncio.wait({self._serve(method, request)})

        self._sim.background(later())

    def _serve(self, method: str, request: bytes) -> asyncio.Future:
        answered = asyncio.get_running_loop().create_future()
        node = self._sim.nodes[self._peer]
        if node.service is None:
            answered.set_exception(unavailable())
            return answered
        handle, decode = node.handlers[method]
        task = spawn(node.process, handle(decode(request), Context(self._caller)))
        task.add_done_callback(lambda done: settle(done, answered))
        return answered


def settle(done: asyncio.Task, answered: asyncio.Future) -> None:
    """Pass on what a service's task came to."""
    if answered.done():
        return
    if done.cancelled():
        answered.set_exception(unavailable())
        return
    error = done.exception()
    if error is None:
        answered.set_result(done.result().SerializeToString())
    elif isinstance(error, Refused):
        answered.set_exception(error.error)
    else:
        answered.set_exception(error)


class Stream:
    """One Push under way, as the caller sees it."""

    def __init__(self, sim, caller: str, peer: str, decode) -> None:
        self._sim = sim
        self._decode = decode
        self._pieces: asyncio.Queue = asyncio.Queue(WINDOW)
        self._broken = False
        self._answered = asyncio.get_running_loop().create_future()
        self._answered.add_done_callback(lambda f: f.cancelled() or f.exception())
        self._task = None
        node = sim.nodes[peer]
        if node.service is None:
            self._answered.set_exception(unavailable())
            return
        push, _ = node.handlers["Push"]
        self._task = spawn(node.process, push(self._arriving(), Context(caller)))
        self._task.add_done_callback(lambda done: settle(done, self._answered))

    async def _arriving(self):
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def write(self, piece: bytes) -> None:
        await self._sim.pause()
        check_alive()
        if self._answered.done():
            # As gRPC does: why it ended is told to whoever asks for the answer.
            raise asyncio.InvalidStateError("the call has ended")
        if self._broken or self._sim.chance("cut"):
            self._break()
            raise unavailable()
        put = asyncio.ensure_future(self._pieces.put(bytes(piece)))
        await asyncio.wait({put, self._answered}, return_when=asyncio.FIRST_COMPLETED)
        if not put.done():
            put.cancel()
            raise asyncio.InvalidStateError("the call has ended")

    async def done_writing(self) -> None:
        check_alive()
        if self._sim.chance("cut"):
            self._break()
            raise unavailable()
        put = asyncio.ensure_future(self._pieces.put(None))
        await asyncio.wait({put, self._answered}, return_when=asyncio.FIRST_COMPLETED)
        put.cancel()

    def __await__(self):
        return self._answer().__await__()

    async def _answer(self):
        return self._decode(await asyncio.shield(self._answered))

    def done(self) -> bool:
        return self._answered.done()

    def cancel(self) -> None:
        if not self._answered.done():
            self._break()

    def _break(self) -> None:
        """The caller hears of it now; the target takes what was under way, and learns later."""
        if self._broken:
            return
        self._broken = True
        if not self._answered.done():
            self._answered.set_exception(unavailable())
        if self._task is not None:
            delay_s = self._sim.random.choice((0.0, 0.0, 0.3, 5.0))
            asyncio.get_running_loop().call_later(delay_s, self._task.cancel)
