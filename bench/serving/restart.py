"""After ``kill -9`` and a restart: what is computed again, and how long the first token takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.serving import processes
from bench.serving.client import Heard, chat, say
from bench.serving.processes import WINDOW_TOKENS, Server
from bench.serving.rows import Row
from bench.serving.texts import asked, prose

#: The text that a first token is timed after, and about as many words.
COLD_TOKENS: Final = 4096
COLD_WORDS: Final = 2600

CONVERSATION_WINDOWS: Final = 20
TURN_WORDS: Final = 220
ANSWER_TOKENS: Final = 24
SLACK_TOKENS: Final = 16

_SETTLED_S: Final = 60.0
_Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Said:
    """A conversation so far, and its last answer."""

    messages: _Messages
    heard: Heard

    @property
    def known_tokens(self) -> int:
        """Of all of it."""
        return int(self.heard.usage["prompt_tokens"]) + self.heard.tokens

    def then(self, text: str) -> _Messages:
        """With one turn more."""
        answered = say("assistant", self.heard.text)
        return [*self.messages, answered, say("user", text)]


def settled(node: Server) -> None:
    """Wait until no cut is on its way to the disk any more.

    Raises:
        OSError: It takes too long.
    """
    end = time.monotonic() + _SETTLED_S
    while node.metric("kvpack_cuts_pending"):
        if time.monotonic() > end:
            raise OSError("cuts are still on their way")
        time.sleep(0.1)


async def talk(node: Server, windows: int) -> Said:
    """A conversation of so many windows."""
    messages, turn = asked(0, TURN_WORDS), 0
    while True:
        said = Said(messages, await chat(node, messages, ANSWER_TOKENS))
        if said.known_tokens >= windows * WINDOW_TOKENS:
            return said
        turn += 1
        messages = said.then(prose(turn, TURN_WORDS))


def conversation(folder: Path) -> Iterator[Row]:
    """A long conversation, a kill, one turn more; then that turn edited, and an unrelated text."""
    data = folder / "restart"
    with processes.node(data) as node:
        said = asyncio.run(talk(node, CONVERSATION_WINDOWS))
        settled(node)
        node.kill()
    with processes.node(data) as node:
        turn = asyncio.run(chat(node, said.then("And then? Tell me all."), ANSWER_TOKENS))
        new = turn.usage["prompt_tokens"] - said.known_tokens
        yield _evaluated(
            f"one turn after kill -9, {said.known_tokens / WINDOW_TOKENS:.0f} windows", turn, new
        )
        settled(node)
        edited = asyncio.run(chat(node, said.then("No: who came to the door?"), ANSWER_TOKENS))
        changed = edited.usage["prompt_tokens"] - said.known_tokens
        yield _evaluated("edit of the last turn after the wrap", edited, changed)
        other = asyncio.run(chat(node, asked(50, 300), ANSWER_TOKENS))
        cached = other.usage["prompt_tokens_details"]["cached_tokens"]
        note = f"{other.reuse['rung']}, {other.reuse.get('miss')}"
        yield Row("miss control: an unrelated prompt", "cached tokens", (cached,), "<=", 0, note)


def _evaluated(name: str, heard: Heard, new: int) -> Row:
    note = (
        f"{heard.usage['prompt_tokens']} tokens of which {new} new, {heard.evaluated} computed; "
        f"{heard.reuse['rung']}"
    )
    bound = SLACK_TOKENS
    return Row(name, "tokens computed beyond new ones", (heard.evaluated - new,), "<=", bound, note)


def mlx_lm_edit(folder: Path) -> Row:
    """An edit of the last turn of a conversation of 3 windows there."""

    async def ask(server: Server) -> float:
        said = await talk(server, 3)
        for text in ("And then? Tell me all.", "No: who came to the door?"):
            heard = await chat(server, said.then(text), ANSWER_TOKENS)
        cached = heard.usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return 1 - int(cached) / int(heard.usage["prompt_tokens"])

    with processes.mlx_lm_server(folder / "mlx-lm") as server:
        computed = asyncio.run(ask(server))
    return Row("edit after 3 windows, mlx_lm.server", "share computed", (computed,))


def first_token(folder: Path, rounds: int) -> Row:
    """First token of a turn after about 4,096 tokens: after a restart, against the cold prompt.

    The cold prompt is asked of a process that has answered before, all but the first; the warm one
    is the first that its process is asked, and pays whatever a first request pays.
    """
    warm: list[Heard] = []
    cold: list[Heard] = []
    warm_cpu_s, cold_cpu_s = 0.0, 0.0
    data = folder / "first-token"
    with contextlib.ExitStack() as running:
        node = running.enter_context(processes.node(data))
        for round_ in range(rounds):
            messages = asked(round_, COLD_WORDS)
            took_s, heard = _timed(node, messages, ANSWER_TOKENS)
            cold.append(heard)
            cold_cpu_s += took_s
            settled(node)
            node.kill()
            running.close()
            node = running.enter_context(processes.node(data))
            took_s, again = _timed(node, Said(messages, heard).then("And then?"), ANSWER_TOKENS)
            warm.append(again)
            warm_cpu_s += took_s
    firsts = [(a.first_s, b.first_s) for a, b in zip(warm, cold, strict=True)]
    note = (
        f"{min(a for a, _ in firsts):.2f} s and {min(b for _, b in firsts):.2f} s at the quickest; "
        f"{cold[0].usage['prompt_tokens']} tokens cold, of {warm[0].usage['prompt_tokens']} "
        f"{warm[0].evaluated} computed, {warm[0].reuse['rung']}; "
        f"processor time is of whole answers of {ANSWER_TOKENS} tokens"
    )
    values = tuple(a / b for a, b in firsts)
    cpu_ratio = warm_cpu_s / cold_cpu_s
    return Row("first token after kill -9", "cold", values, "<=", 0.1, note, cpu_ratio)


def _timed(node: Server, messages: _Messages, max_tokens: int) -> tuple[float, Heard]:
    """Processor seconds of the node, and what was heard."""
    before = node.cpu_s()
    heard = asyncio.run(chat(node, messages, max_tokens))
    return node.cpu_s() - before, heard
