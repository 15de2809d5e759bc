"""What gRPC for Python carries when nothing else is done: the most that a push over it could reach.

One client stream of ``grpc.aio`` on both ends, messages of 2 MiB as they are, memory kept as a node
keeps it (:func:`node.config.prepare_process`). ``sealed`` opens each message where it belongs: no
frame, no reference, no rows out of a tile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from bench.peers import MUTUAL, NOTHING, Variant, certificates, messages

VARIANTS = {
    "plain": Variant("gRPC stream alone", NOTHING),
    "plain_sealed": Variant("gRPC stream alone, messages opened", messages.SEALED),
    "mtls": Variant("gRPC stream alone, mTLS", MUTUAL),
    "mtls_sealed": Variant(
        "gRPC stream alone, mTLS, messages opened", f"{MUTUAL}; {messages.SEALED}"
    ),
}

_METHOD = "Push"
_SERVICE = "bench.Stream"


def load() -> None:
    _grpc()


def receive(link: Any, buffer: Any, variant: str) -> None:
    asyncio.run(_receive(link, buffer, variant))


async def _receive(link: Any, buffer: Any, variant: str) -> None:
    grpc = _grpc()
    place = messages.placing(buffer, sealed=variant.endswith("_sealed"))
    filled = asyncio.Event()

    async def push(stream: AsyncIterator[bytes], context: Any) -> bytes:
        async for message in stream:
            place(message)
        filled.set()
        return b"k"

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    handler = grpc.stream_unary_rpc_method_handler(push, None, None)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
    )
    if variant.startswith("mtls"):
        folder = link.folder / "certificates"
        leaf, key = certificates.leaf_pem(folder, "target")
        port = server.add_secure_port(
            "127.0.0.1:0",
            grpc.ssl_server_credentials(
                [(key, leaf)], certificates.authority_pem(folder, "target"), True
            ),
        )
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link.listening(port)
    await filled.wait()
    # The answer goes out before the process compares what it got.
    await server.stop(5.0)


def send(address: int, payload: Any, variant: str, folder: Path) -> Callable[[], None]:
    grpc = _grpc()
    pieces = messages.cut(payload, sealed=variant.endswith("_sealed"))
    loop = asyncio.new_event_loop()
    # gRPC's own thread hands what comes to the loop that runs when it is first used.
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def connect() -> Any:
        where = f"127.0.0.1:{address}"
        if variant.startswith("mtls"):
            own = folder / "certificates"
            leaf, key = certificates.leaf_pem(own, "source")
            root = certificates.authority_pem(own, "source")
            channel = grpc.aio.secure_channel(
                where,
                grpc.ssl_channel_credentials(root, key, leaf),
                options=[("grpc.ssl_target_name_override", "target")],
            )
        else:
            channel = grpc.aio.insecure_channel(where)
        await channel.channel_ready()
        return channel

    channel = asyncio.run_coroutine_threadsafe(connect(), loop).result(30.0)

    async def push() -> None:
        call = channel.stream_unary(f"/{_SERVICE}/{_METHOD}")()
        for piece in pieces:
            await call.write(piece)
        await call.done_writing()
        if await call != b"k":
            raise OSError("the stream was cut")

    return lambda: asyncio.run_coroutine_threadsafe(push(), loop).result(60.0)


def _grpc() -> Any:
    from node.config import prepare_process

    # gRPC reads its environment when it is imported.
    prepare_process()
    import grpc
    import grpc.aio

    return grpc
