"""Drives the two ends of a peer, and says why there is no figure where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.measured import FAILED, NOT_INSTALLED, Contender, Sample
from bench.peers import Variant
from bench.turns import NoFigureError, Turn

ROOT = Path(__file__).resolve().parents[2]

#: A transfer of the payload, start of both processes included.
LIMIT_S = 90.0
CHECK_S = 60.0


def require_installed(name: str) -> None:
    """Refuse a peer that cannot be imported.

    Raises:
        NoFigureError: In the words of the import.
    """
    with _running("check", name, log=None) as process:
        said = _line(process, time.monotonic() + CHECK_S, allow_end=True)
    if "problem" in said:
        raise NoFigureError(NOT_INSTALLED if said["missing"] else FAILED, said["problem"])


def transfer(name: str, variant: str, how: Variant, payload: Path, folder: Path) -> Sample:
    """Send ``payload`` once from one process to another.

    Raises:
        NoFigureError: It did not get there, not whole, or not in time.
    """
    end = time.monotonic() + LIMIT_S
    arguments = (name, variant, str(payload), str(folder))
    extra = dict(how.environment)
    with contextlib.ExitStack() as stack:
        log = folder / f"{name}.log"
        target = stack.enter_context(_running("receive", *arguments, log=log, extra=extra))
        address = _said(target, "address", end)
        source = stack.enter_context(_running("send", *arguments, log=log, extra=extra))
        _write(source, json.dumps(address))
        _said(source, "go", end)
        _write(target, "go")
        sent = _line(source, end)
        if "problem" in sent:
            raise NoFigureError(FAILED, sent["problem"])
        _write(target, "end")
        got = _line(target, end)
        if "problem" in got:
            raise NoFigureError(FAILED, got["problem"])
    if not got["equal"]:
        raise NoFigureError(FAILED, "the bytes that arrived are not the ones that were sent")
    detail = {"source_cpu_s": sent["cpu_s"], "target_cpu_s": got["cpu_s"]}
    size = payload.stat().st_size
    return Sample(sent["seconds"], size, sent["cpu_s"] + got["cpu_s"], detail)


def stored(name: str, variant: str, how: Variant, payload: Path, folder: Path) -> Sample:
    """Write ``payload`` and read it back, in one process.

    Raises:
        NoFigureError: It did not come back, not whole, or not in time.
    """
    end, extra = time.monotonic() + LIMIT_S, dict(how.environment)
    arguments = (name, variant, str(payload), str(folder))
    with _running("store", *arguments, log=folder / f"{name}.log", extra=extra) as process:
        said = _line(process, end)
    if "problem" in said:
        raise NoFigureError(FAILED, said["problem"])
    if not said["equal"]:
        raise NoFigureError(FAILED, "the bytes that came back are not the ones that were written")
    size, detail = payload.stat().st_size, said["detail"]
    return Sample(sum(detail.values()), size, said["cpu_s"], detail)


def peer_turns(
    name: str, variants: Mapping[str, Variant], group: str, against: str, payload: Path,
    folder: Path, once: Any = transfer,
) -> Iterator[Turn]:  # fmt: skip
    """A turn for each way to use the peer; the first one looks whether it is installed."""
    for variant, how in variants.items():
        word = f"{name}_{variant}" if variant else name
        contender = Contender(word, how.title, group, against, how.protects)

        def work(
            contender: Contender = contender, variant: str = variant, how: Variant = how
        ) -> dict[str, Sample]:
            if not contender.samples:
                require_installed(name)
            return {contender.name: once(name, variant, how, payload, folder)}

        yield Turn([contender], work)


@contextlib.contextmanager
def _running(
    *arguments: str, log: Path | None, extra: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """An end that never outlives the block."""
    sink: Any = subprocess.DEVNULL if log is None else log.open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peers.process", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sink,
        env={**os.environ, **(extra or {})},
        bufsize=0,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(0.0 if process.poll() is None and sys.exc_info()[0] else 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        if log is not None:
            sink.close()


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line.encode() + b"\n")


def _said(process: subprocess.Popen[bytes], word: str, end: float) -> Any:
    said = _line(process, end)
    if word not in said:
        raise NoFigureError(FAILED, str(said.get("problem", f"said {said} instead of {word}")))
    return said[word]


def _line(
    process: subprocess.Popen[bytes], end: float, *, allow_end: bool = False
) -> dict[str, Any]:
    """The next JSON object that it says; peers write other lines there, too."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left_s = end - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                raise NoFigureError(FAILED, f"{process.args[3]} gave no answer in time")
            byte = os.read(process.stdout.fileno(), 1)
            if not byte:
                if allow_end:
                    return {}
                raise NoFigureError(FAILED, f"{process.args[3]} ended without an answer")
            if byte != b"\n":
                buffer += byte
                continue
            if buffer.startswith(b"{"):
                with contextlib.suppress(ValueError):
                    found: dict[str, Any] = json.loads(buffer)
                    return found
            buffer = b""
