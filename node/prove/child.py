"""The child process: ``python -m node.prove.child``. Its main thread is the engine thread.

It answers one request after the other on standard output and ends when its standard input does, in
the middle of a computation too: it cannot outlive its parent.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from blake3 import blake3

from kvpack.errors import EXIT_INTERRUPTED, KvpackError
from kvpack.layout import CacheLayout, LayerKind
from kvpack.wire import encode_numerics
from node.prove.cases import Continuation, History, Route
from node.prove.messages import (
    Facts,
    decode,
    encode,
    history_of,
    pair_of,
    rollback_of,
    station_of,
)
from node.prove.reader import Reader
from node.prove.sessions import live_session, single_calls
from node.prove.writer import Writer, Written

if TYPE_CHECKING:
    from engine import Model

_WARM_TOKENS: Final = 64
_WARM_STEPS: Final = 6

#: Requests that wait: the parent sends one at a time.
_WAITING_MAX: Final = 2

Request = Mapping[str, Any]


class Child:
    """The model, and what is asked of it."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        self._operations: dict[str, Callable[[Request], object]] = {
            "load": self._load,
            "write control": self._write_control,
            "write station": self._write_station,
            "write rollback": self._write_rollback,
            "shapes": self._shapes,
            "read control": self._read_control,
            "restore": self._restore,
            "rollback": self._rollback,
        }

    def answer(self, request: Request) -> dict[str, Any]:
        """The answer to one request; a refusal is an answer, too."""
        try:
            return {"answer": self._operations[request["op"]](request)}
        except (KvpackError, OSError) as error:
            reason = getattr(error, "reason", "system")
            return {"error": str(error), "kind": type(error).__name__, "reason": reason}

    def _load(self, request: Request) -> Facts:
        from engine import load_model

        start = time.monotonic()
        self._model = model = load_model(Path(request["model"]), dtype=request["dtype"])
        load_s = time.monotonic() - start
        folder = Path(request["folder"])
        self._writer, self._reader = Writer(model, folder), Reader(model, folder)
        return _facts(model, load_s)

    def _write_control(self, request: Request) -> dict[str, Any]:
        return _written(self._loaded_writer().control(history_of(request["history"])))

    def _write_station(self, request: Request) -> dict[str, Any]:
        return _written(self._loaded_writer().station(station_of(request["station"])))

    def _write_rollback(self, request: Request) -> dict[str, Any]:
        return _written(self._loaded_writer().rollback(rollback_of(request["station"])))

    def _shapes(self, request: Request) -> dict[str, Any]:
        return self._loaded_writer().shapes(pair_of(request["pair"])).as_json()

    def _read_control(self, request: Request) -> dict[str, Any]:
        return self._loaded_reader().control(history_of(request["history"])).as_json()

    def _restore(self, request: Request) -> dict[str, Any]:
        station = station_of(request["station"])
        route, kind = Route(request["route"]), Continuation(request["continuation"])
        return self._loaded_reader().restore(station, route, kind).as_json()

    def _rollback(self, request: Request) -> dict[str, Any]:
        station, (count, kept) = rollback_of(request["station"]), request["block"]
        return self._loaded_reader().rollback(station, count, kept).as_json()

    def _loaded_writer(self) -> Writer:
        if self._writer is None:
            raise RuntimeError("load first")
        return self._writer

    def _loaded_reader(self) -> Reader:
        if self._reader is None:
            raise RuntimeError("load first")
        return self._reader


def _written(written: Written) -> dict[str, Any]:
    return {"control": written.control.as_json(), "file_bytes": written.file_bytes}


def _facts(model: Model, load_s: float) -> Facts:
    layout, identity, numerics = model.layout, model.identity("prove"), model.numerics()
    token_s, step_s = _speeds(model)
    return Facts(
        windows=tuple(sorted({x.window_tokens for x in layout.layers if x.window_tokens})),
        context_tokens=layout.max_context_tokens,
        sliding_layers=len(layout.layers_of(LayerKind.SWA)),
        full_layers=len(layout.layers_of(LayerKind.FULL)),
        full_row_bytes=layout.state_bytes(LayerKind.FULL, 1),
        window_bytes=_window_bytes(layout),
        # The ABI ends with architecture and dtype; before them stands the row convention.
        model=identity.engine_abi.split()[-2],
        dtype=identity.engine_abi.split()[-1],
        numerics=dict(numerics.values),
        numerics_digest=blake3(encode_numerics(numerics)).hexdigest(),
        load_s=load_s,
        step_s=step_s,
        token_s=token_s,
    )


def _window_bytes(layout: CacheLayout) -> int:
    return sum(
        (layer.window_tokens or 0) * layout.row_bytes(index)
        for index, layer in enumerate(layout.layers)
    )


def _speeds(model: Model) -> tuple[float, float]:
    """Seconds per prefilled token and per single-token call, the second time round."""
    history = History.of("warm-up", [min(_WARM_TOKENS, model.layout.max_context_tokens // 2)])
    live_session(model, history)
    start = time.monotonic()
    session = live_session(model, history)
    prefilled = time.monotonic()
    list(single_calls(model, session, _WARM_STEPS, "warm-up"))
    end = time.monotonic()
    return (prefilled - start) / history.position, (end - prefilled) / _WARM_STEPS


def main() -> None:
    """Answer until standard input ends."""
    requests: queue.Queue[bytes] = queue.Queue(_WAITING_MAX)
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    child, out = Child(), _own_stdout()
    while True:
        out.write(encode(child.answer(decode(requests.get()))))
        out.flush()


def _listen(requests: queue.Queue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    # The parent has gone, or needs nothing more. Whatever is being computed is for nobody.
    os._exit(EXIT_INTERRUPTED)


def _own_stdout() -> BinaryIO:
    """Standard output for answers alone: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


if __name__ == "__main__":
    main()
