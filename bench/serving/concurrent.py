"""Four chats at once, a long prompt that arrives meanwhile, and ``mlx_lm.server`` beside it."""

from __future__ import annotations

import asyncio
import itertools
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.serving import processes
from bench.serving.client import LIMIT_S, Heard, chat, say
from bench.serving.processes import Server
from bench.serving.rows import Row, percentile, ratios
from bench.serving.texts import OPENINGS, asked

CHATS: Final = 4
#: Of each answer. Long enough for the beginning and the end to be little of it.
TOKENS: Final = 48
#: Words of a prompt of about 4,096 tokens.
LONG_WORDS: Final = 2600
CHUNK_TOKENS: Final = 64


@dataclass
class Rates:
    """One server with so many chats, round by round.

    Attributes:
        tokens_s: Tokens a second, of all chats together, from the first request to the last byte.
        p95_s: The gap between two tokens of a chat that 95 of 100 do not exceed.
        cpu_s: Processor seconds of the server for each token.
    """

    tokens_s: list[float] = field(default_factory=list)
    p95_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def round(self, server: Server, chats: int, words: tuple[str, ...]) -> None:
        """One more."""
        cpu_s, began_s = server.cpu_s(), time.perf_counter()
        answers = asyncio.run(_together(server, words[:chats]))
        took_s = time.perf_counter() - began_s
        tokens = sum(answer.tokens for answer in answers)
        self.tokens_s.append(tokens / took_s)
        self.cpu_s.append((server.cpu_s() - cpu_s) / tokens)
        self.p95_s.append(percentile([gap for one in answers for gap in one.gaps_s], 0.95))


async def _together(server: Server, texts: tuple[str, ...]) -> list[Heard]:
    return await asyncio.gather(*(chat(server, [say("user", text)], TOKENS) for text in texts))


def four_chats(folder: Path, rounds: int) -> Iterator[Row]:
    """A node with one chat, with four, and the other server with four, in turns."""
    single, four, theirs = Rates(), Rates(), Rates()
    with (
        processes.node(folder / "chats", "--slots", str(CHATS)) as node,
        processes.mlx_lm_server(folder / "mlx-lm") as other,
    ):
        turns = [(single, node, 1), (four, node, CHATS), (theirs, other, CHATS)]
        for round_ in range(-1, rounds):
            texts = tuple(f"{opening} ({round_ + 2})" for opening in OPENINGS)
            first = round_ % len(turns)
            for rates, server, chats in turns[first:] + turns[:first]:
                # The first round warms up, and neither is to be told a text twice.
                chosen = tuple(f"{text} Once." for text in texts) if chats == 1 else texts
                (rates if round_ >= 0 else Rates()).round(server, chats, chosen)
    yield Row(
        f"tokens/s, {CHATS} chats", f"mlx_lm.server, {CHATS} clients",
        ratios(four.tokens_s, theirs.tokens_s), ">=", 1.0,
        f"{statistics.median(four.tokens_s):.1f} and {statistics.median(theirs.tokens_s):.1f} "
        f"tokens/s; processor {1e3 * statistics.median(four.cpu_s):.1f} and "
        f"{1e3 * statistics.median(theirs.cpu_s):.1f} ms a token",
        statistics.median(ratios(theirs.cpu_s, four.cpu_s)),
    )  # fmt: skip
    yield Row(
        f"per-token p95, {CHATS} chats", f"{CHATS} x that of one chat",
        tuple(a / (CHATS * b) for a, b in zip(four.p95_s, single.p95_s, strict=True)), "<=", 1.15,
        f"{1e3 * statistics.median(four.p95_s):.0f} and "
        f"{1e3 * statistics.median(single.p95_s):.0f} ms",
        statistics.median(ratios(four.cpu_s, single.cpu_s)),
    )  # fmt: skip


def long_prompt(folder: Path, rounds: int) -> Iterator[Row]:
    """A prompt of about 4,096 tokens arrives while a chat is running."""
    passed: list[float] = []
    gaps: list[float] = []
    with processes.node(folder / "long", "--slots", "2") as node:
        for round_ in range(rounds):
            tokens, progress = asyncio.run(_meet(node, round_))
            passed += _passed(tokens, progress)
            chunk_s = statistics.median(b - a for (a, _), (b, _) in itertools.pairwise(progress))
            inside = [at for at in tokens if progress[0][0] < at < progress[-1][0]]
            widest = percentile([b - a for a, b in itertools.pairwise(inside)], 0.95)
            gaps.append(widest / chunk_s)
    yield Row(
        "prompt tokens computed between two tokens of a running chat", "tokens",
        (max(passed),), "<=", CHUNK_TOKENS, f"{len(passed)} tokens were told meanwhile",
    )  # fmt: skip
    yield Row(
        "p95 of a running chat's gaps meanwhile", "one chunk and one step", tuple(gaps), "", 0.0
    )


async def _meet(node: Server, round_: int) -> tuple[list[float], list[tuple[float, int]]]:
    """When tokens of the chat came, and when so many of the prompt's were computed."""
    progress: list[tuple[float, int]] = []

    def note(at_s: float, line: bytes) -> None:
        if found := re.match(rb": prefill (\d+)/", line):
            progress.append((at_s, int(found[1])))

    def count(at_s: float, line: bytes) -> None:
        if b'"content":"' in line and next(pieces) == 3:
            running.set()

    pieces, running = itertools.count(), asyncio.Event()
    words = [say("user", OPENINGS[round_ % CHATS])]
    # It ends when the prompt is through, or at its own end.
    talking = asyncio.create_task(chat(node, words, 400, hear=count, ignore_eos=True))
    await asyncio.wait_for(running.wait(), LIMIT_S)
    await chat(node, asked(round_ + 20, LONG_WORDS), 1, cache_prompt=False, hear=note)
    return list((await talking).times_s), progress


def _passed(tokens: list[float], progress: list[tuple[float, int]]) -> list[float]:
    """Prompt tokens computed between each two tokens of the chat, as their client saw it."""
    found = []
    for before, after in itertools.pairwise(tokens):
        done = [count for at, count in progress if before <= at < after]
        earlier = [count for at, count in progress if at < before]
        if done and earlier:
            found.append(float(done[-1] - earlier[-1]))
    return found
