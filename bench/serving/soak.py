"""A thousand requests of which a third hang up anywhere, and how long a node takes to start."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.serving import processes
from bench.serving.client import chat, say
from bench.serving.processes import Server
from bench.serving.restart import settled
from bench.serving.rows import Row
from node.tiny import make_tiny_model

REQUESTS: Final = 1000
CLIENTS: Final = 6
SLOTS: Final = 3
TOKENS_MAX: Final = 8
#: Memory is weighed after each of so many parts; the first ones fill caches that have a bound.
PARTS: Final = 10
WARM_PARTS: Final = 5
CACHE_BYTES: Final = "2MiB"
_QUIET_S: Final = 30.0


def tiny(folder: Path) -> Path:
    """The tiny model: window 16, four layers."""
    make_tiny_model(folder / "tiny", "muse_glimmer", seed=3, window=16, layers=4)
    return folder / "tiny"


def soak(folder: Path, requests: int) -> Iterator[Row]:
    """Many short answers."""
    draws = random.Random(7)
    weights: list[int] = []
    arguments = ("--slots", str(SLOTS), "--cache-bytes", CACHE_BYTES)
    with processes.node(folder / "soak", *arguments, model=tiny(folder)) as node:
        broken = 0
        for part in range(PARTS):
            broken += asyncio.run(_part(node, requests // PARTS, draws))
            _quiet(node)
            if part + 1 in (WARM_PARTS, PARTS):
                settled(node)
            weights.append(node.resident_bytes())
        yield from _counters(node, requests, broken)
    base = weights[WARM_PARTS - 1]
    growth = (weights[-1] - base) / base
    note = f"MiB after each tenth: {', '.join(f'{one / 2**20:.0f}' for one in weights)}"
    yield Row("memory from the half to the end", "growth", (growth,), "<=", 0.05, note)


async def _part(node: Server, requests: int, draws: random.Random) -> int:
    """So many requests by a few clients; how many of them hung up."""
    orders = [_order(draws) for _ in range(requests)]
    waiting = iter(orders)

    async def client() -> None:
        for words, stop_after in waiting:
            await chat(node, [say("user", words)], TOKENS_MAX, stop_after=stop_after)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return sum(stop_after is not None for _, stop_after in orders)


def _order(draws: random.Random) -> tuple[str, int | None]:
    """What to ask, and after how many pieces to hang up; None: not at all."""
    words = f"{draws.randrange(400)} " * draws.randrange(4, 40)
    return words, draws.randrange(TOKENS_MAX) if draws.random() < 1 / 3 else None


def _quiet(node: Server) -> None:
    """Wait until no answer is made.

    Raises:
        OSError: It takes too long: a slot was lost.
    """
    end = time.monotonic() + _QUIET_S
    while node.metric("kvpack_queue_waiting") or _idle(node) < SLOTS:
        if time.monotonic() > end:
            raise OSError("a slot does not become free")
        time.sleep(0.05)


def _idle(node: Server) -> int:
    return sum(not slot["is_processing"] for slot in node.json("/slots"))


def _counters(node: Server, requests: int, broken: int) -> Iterator[Row]:
    """Every answer that was taken on has ended in exactly one way, and no slot is lost."""
    submitted = node.metric("kvpack_answers_submitted_total")
    ended = node.metric("kvpack_answers_total")
    note = (
        f"{requests} requests, {broken} of which hung up; {submitted:.0f} submitted, "
        f"{ended:.0f} ended, {_idle(node)} of {SLOTS} slots free"
    )
    # Who hangs up before its request was read never had an answer submitted.
    lost = abs(submitted - ended) + SLOTS - _idle(node)
    missing = max(0.0, requests - broken - submitted) + max(0.0, submitted - requests)
    yield Row("answers or slots lost", "count", (lost + missing,), "<=", 0, note)


def start_up(folder: Path, rounds: int) -> Row:
    """Seconds until a node of the tiny model is ready, from the start of its process.

    Modules are compiled, as an installation leaves them; one start before the counted ones does it.
    """
    model, bytecode = tiny(folder), folder / "bytecode"
    took, cpu = [], []
    for round_ in range(rounds + 1):
        with processes.node(folder / f"start-{round_}", model=model, bytecode=bytecode) as node:
            took.append(node.started_s)
            cpu.append(node.cpu_s())
    note = (
        f"quickest {min(took[1:]):.2f} s; processor {min(cpu[1:]):.2f} s; "
        f"compiling all modules first: {took[0]:.1f} s"
    )
    return Row("start of a node with the tiny model", "seconds", tuple(took[1:]), "<=", 3.0, note)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Where a run keeps its files."""
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as name:
        yield Path(name)
