"""What the publication of cuts costs the tokens of an answer.

    python -m bench.serving --only publication
    python -m bench.serving.publication [--model DIR] [--rounds N] [--tokens N]

Two streams of one model take turns: for some tokens one of them decodes while cuts of it are being
made durable, for as many the other decodes and nothing is kept. A token's time is from one token to
the next, the copy of rings included where a cut fell in between. Each round begins with a cut, so
cuts are as dense here as ``--tokens`` says; a node makes them at multiples of the cadence (1,024
tokens for the model of the repository) and at the ends of prompts and turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.serving.rows import Row
from kvpack.keys import generate_key
from kvpack.store import Budget, HoldKind, open_store
from node.binding import PackBinding
from node.engine_thread import EngineThread
from node.serving.ladder import RowLadder
from node.stream import Stream

_MODEL = Path(__file__).parents[2] / "examples" / "models" / "muse-novels-6m"

TOKENS = 128
PROMPT_TOKENS = 2048


@dataclass
class Times:
    """Seconds of single tokens."""

    kept_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)

    def lines(self) -> list[str]:
        kept, plain = (sorted(times) for times in (self.kept_s, self.plain_s))
        rows = []
        for name, at in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
            ours, theirs = (times[int(at * (len(times) - 1))] for times in (kept, plain))
            rows.append(
                f"{name}: {1000 * ours:.3f} ms while cuts are written, {1000 * theirs:.3f} ms "
                f"without, ratio {ours / theirs:.3f}"
            )
        ours, theirs = statistics.fmean(kept), statistics.fmean(plain)
        return [*rows, f"mean: ratio {ours / theirs:.3f}", f"tokens of each: {len(kept)}"]


async def _stream(engine: EngineThread, prompt_tokens: int) -> Stream:
    ids = [(i * i * 31 + i * 17 + 5) % 2000 for i in range(prompt_tokens)]
    generation = await engine.call(engine.model.new_generation)
    stream = Stream(generation, ids, engine.model.vocab_size)
    while size := stream.backlog_call(512):
        await engine.call(stream.prefill_next, size)
    return stream


async def _tokens(engine: EngineThread, stream: Stream, count: int, times: list[float]) -> None:
    last = time.perf_counter()
    for _ in range(count):
        await engine.call(stream.decode_next)
        now = time.perf_counter()
        times.append(now - last)
        last = now


def publication(rounds: int) -> Iterator[Row]:
    """What it costs, as rows of a table."""
    times = asyncio.run(measure(_MODEL, rounds, TOKENS, PROMPT_TOKENS, said=_silent))
    per_round = [
        statistics.median(times.kept_s[at : at + TOKENS])
        / statistics.median(times.plain_s[at : at + TOKENS])
        for at in range(0, len(times.kept_s), TOKENS)
    ]
    yield Row(
        "token while a cut is made durable", "token without", tuple(per_round), "<=", 1.05,
        "; ".join(times.lines()),
    )  # fmt: skip


def _silent(line: str) -> None:
    """The rows say it."""


async def measure(
    model: Path, rounds: int, tokens: int, prompt_tokens: int, said: Callable[[str], None] = print
) -> Times:
    """Measure, and say what came of it."""
    engine, key = await EngineThread.load(model), generate_key("bench")
    binding = PackBinding.of(engine.model, key)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", create=True)
        ladder = RowLadder(
            engine, lambda _: binding, store, Budget(free_bytes_min=0), busy=lambda: True
        )
        ladder.start()
        kept, plain = await _stream(engine, prompt_tokens), await _stream(engine, prompt_tokens)
        trail, times = ladder.trail("bench", kept, None), Times()
        durable_s = []
        for _ in range(rounds):
            began = time.perf_counter()
            await trail.cut(HoldKind.TURN)
            copied = time.perf_counter() - began
            await _tokens(engine, kept, tokens, times.kept_s)
            times.kept_s[-tokens] += copied
            waiting = ladder.pending
            await ladder.settled()
            durable_s.append((copied, waiting))
            await _tokens(engine, plain, tokens, times.plain_s)
        said("\n".join(times.lines()))
        copies = [copied for copied, _ in durable_s]
        said(f"copy of rings at a cut: median {1000 * statistics.median(copies):.3f} ms")
        late = sum(waiting > 0 for _, waiting in durable_s)
        said(f"cuts still being written after {tokens} tokens: {late} of {rounds}")
        counted = ladder.accounts
        said(f"published {counted.published}, dropped {counted.dropped}, "
              f"{counted.published_bytes} bytes")  # fmt: skip
        await ladder.close()
    engine.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=_MODEL)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS)
    given = parser.parse_args()
    asyncio.run(measure(given.model, given.rounds, given.tokens, given.prompt))


if __name__ == "__main__":
    main()
