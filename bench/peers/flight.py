"""Arrow Flight's DoPut, plain and with TLS: record batches of 1 MiB, copied into place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import NOTHING, SERVER, Variant, certificates

VARIANTS = {
    "plain": Variant("Arrow Flight DoPut", NOTHING),
    "tls": Variant("Arrow Flight DoPut, TLS", SERVER),
}
PIECE_BYTES = 1 << 20


def load() -> None:
    import pyarrow.flight  # noqa: F401


def receive(link: Any, buffer: Any, variant: str) -> None:
    from pyarrow import flight

    filled = threading.Event()

    class Server(flight.FlightServerBase):
        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            at = 0
            for chunk in reader:
                data = np.frombuffer(chunk.data.column(0).buffers()[-1], np.uint8)
                buffer[at : at + len(data)] = data
                at += len(data)
            filled.set()

    options = {}
    if variant == "tls":
        folder = link.folder / "certificates"
        options = {"tls_certificates": [certificates.leaf_pem(folder, "target")]}
    scheme = "grpc+tls" if options else "grpc"
    server = Server(f"{scheme}://127.0.0.1:0", **options)
    threading.Thread(target=server.serve, daemon=True).start()
    link.listening(server.port)
    filled.wait()


def send(address: int, payload: Any, variant: str, folder: Path) -> Callable[[], None]:
    import pyarrow as pa
    from pyarrow import flight

    options = {}
    if variant == "tls":
        own = folder / "certificates"
        root = certificates.authority_pem(own, "source")
        options = {"tls_root_certs": root, "override_hostname": "target"}
    scheme = "grpc+tls" if options else "grpc"
    client = flight.connect(f"{scheme}://127.0.0.1:{address}", **options)
    schema = pa.schema([("data", pa.uint8())])
    batches = []
    for start in range(0, len(payload), PIECE_BYTES):
        piece = payload[start : start + PIECE_BYTES]
        array = pa.Array.from_buffers(pa.uint8(), len(piece), [None, pa.py_buffer(piece)])
        batches.append(pa.record_batch([array], schema=schema))

    def work() -> None:
        writer, reader = client.do_put(flight.FlightDescriptor.for_path("payload"), schema)
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()
        reader.read()
        writer.close()

    return work
