"""What the measurements on a GPU share: options, the machine, a time limit, the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from bench.engine.reference import Geometry
from engine import backend

PACKAGES = ("mlx", "mlx-lm", "numpy", "torch", "transformers", "grpcio", "kvpack")


def parser(module: str, text: str | None, limit_s: float) -> argparse.ArgumentParser:
    """Options of every measurement: the geometry, the time, the file."""
    made = argparse.ArgumentParser(
        prog=f"python -m bench.gpu.{module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--layers", type=int, default=52, help="a multiple of four (default: 52)")
    made.add_argument("--window", type=int, default=2048, help="tokens (default: 2,048)")
    made.add_argument("--hidden", type=int, default=256, help="residual width (default: 256)")
    made.add_argument("--query-heads", type=int, default=32)
    made.add_argument("--limit-s", type=float, default=limit_s, help="stop beginning things then")
    made.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return made


def geometry(options: argparse.Namespace) -> Geometry:
    """The reference's, or the smaller one that was asked for."""
    return Geometry(options.layers, options.window, options.hidden, options.query_heads)


class Limit:
    """Seconds that are left, and a line for each thing that is begun."""

    def __init__(self, seconds: float) -> None:
        self.start = time.perf_counter()
        self.seconds = seconds
        self.skipped: list[str] = []

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left_s(self) -> float:
        return self.seconds - self.passed_s

    def allows(self, name: str, needs_s: float = 0.0) -> bool:
        """Whether there is time for ``name``; if not, it is noted as skipped."""
        if self.left_s > needs_s:
            self.say(name)
            return True
        self.skipped.append(name)
        self.say(f"no time for: {name}")
        return False

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"[{self.passed_s:7.1f} s] {text}", file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """What was measured on."""
    found: dict[str, object] = {
        "device": backend.device_description(),
        "backend": backend.backend_name(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": list(os.getloadavg()),
        "mlx": mx.__version__,
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write(out: Path, name: str, options: argparse.Namespace, limit: Limit, results: object) -> None:
    """Write the result, whole or not at all."""
    arguments = {key: str(value) for key, value in vars(options).items() if key != "out"}
    said = {
        "measurement": name,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m bench.gpu." + " ".join([name, *_arguments(sys.argv[1:])]),
        "machine": machine(),
        "arguments": arguments,
        "seconds": round(limit.passed_s, 1),
        "skipped": limit.skipped,
        "results": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    private = out.with_name(out.name + ".part")
    private.write_text(json.dumps(said, indent=1) + "\n")
    private.replace(out)
    limit.say(f"wrote {out.name}")


def _arguments(given: Sequence[str]) -> list[str]:
    """The command's own arguments, without where its result went."""
    kept, skip = [], False
    for argument in given:
        if skip:
            skip = False
        elif argument == "--out":
            skip = True
        elif not argument.startswith("--out="):
            kept.append(argument)
    return kept


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median and range."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "rounds": len(values),
    }


def peak_host_bytes() -> int:
    """Most memory that this process ever had in the host's."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def token_ids(count: int, vocab_size: int) -> list[int]:
    """A fixed stream without a short period."""
    return [(i * i * 31 + i * 17 + 5) % min(251, vocab_size) for i in range(count)]
