"""A client that notes when each token came, and costs the two cores little meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from bench.serving.processes import Server

#: An answer takes no longer.
LIMIT_S: Final = 170.0

_CHAT: Final = "/v1/chat/completions"
_LINE_BYTES: Final = 1 << 20

#: Told when a line came, and the line.
Hear = Callable[[float, bytes], None]


def _ignore(came_s: float, line: bytes) -> None:
    """It is read later."""


@dataclass(frozen=True)
class Heard:
    """One streamed answer.

    Attributes:
        asked_s: When it was asked for, by ``time.perf_counter``.
        times_s: When each piece of text came.
        text: All of it.
        usage: As it was told; empty where the answer was broken off.
        reuse: The field ``kvpack``; empty from others.
    """

    asked_s: float
    times_s: tuple[float, ...]
    text: str
    usage: dict[str, Any]
    reuse: dict[str, Any]

    @property
    def first_s(self) -> float:
        """Seconds to the first piece of text."""
        return self.times_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between pieces."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def tokens(self) -> int:
        """Generated ones."""
        return int(self.usage["completion_tokens"])

    @property
    def evaluated(self) -> int:
        """Tokens of the prompt that were computed."""
        return int(self.reuse["evaluated_tokens"])


def say(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


async def chat(
    server: Server,
    messages: list[dict[str, str]],
    max_tokens: int,
    *,
    stop_after: int | None = None,
    hear: Hear = _ignore,
    **fields: object,
) -> Heard:
    """A streamed chat completion.

    Args:
        server: Who answers.
        messages: The conversation.
        max_tokens: Of the answer.
        stop_after: Hang up after so many pieces of text; None: hear it all.
        hear: Told of each event and comment as it comes.
        fields: Of the request.

    Raises:
        OSError: It was refused, or broke off.
        TimeoutError: It took too long.
    """
    body = {
        "model": "default_model", "messages": messages, "max_tokens": max_tokens,
        "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        return await _ask(server, json.dumps(body).encode(), stop_after, hear)


async def _ask(server: Server, body: bytes, stop_after: int | None, hear: Hear) -> Heard:
    where = urllib.parse.urlsplit(server.url)
    asked_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=_LINE_BYTES)
    try:
        writer.write(
            f"POST {_CHAT} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        if stop_after == 0:
            return _heard(asked_s, [])
        status = await reader.readline()
        if b" 200 " not in status:
            raise OSError(f"{status!r}: {(await reader.read(2000))[-500:]!r}")
        return _heard(asked_s, await _lines(reader, stop_after, hear))
    finally:
        writer.close()


async def _lines(
    reader: asyncio.StreamReader, stop_after: int | None, hear: Hear
) -> list[tuple[float, bytes]]:
    """Events with their times. Read as JSON later: not while others are timed."""
    lines: list[tuple[float, bytes]] = []
    pieces = 0
    while line := await reader.readline():
        if line.startswith((b":", b"data: ")):
            hear(time.perf_counter(), line)
        if not line.startswith(b"data: "):
            continue
        lines.append((time.perf_counter(), line[6:]))
        pieces += 1
        # The first event holds the role and no text.
        if line.startswith(b"data: [DONE]") or (stop_after is not None and pieces > stop_after):
            break
    return lines


def _heard(asked_s: float, lines: list[tuple[float, bytes]]) -> Heard:
    times, texts = [], []
    usage: dict[str, Any] = {}
    reuse: dict[str, Any] = {}
    for came_s, line in lines:
        if line.startswith(b"[DONE]"):
            break
        event = json.loads(line)
        if "error" in event:
            raise OSError(f"the answer ended: {event['error']}")
        usage = event.get("usage") or usage
        reuse = event.get("kvpack") or reuse
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                times.append(came_s)
                texts.append(text)
    return Heard(asked_s, tuple(times), "".join(texts), usage, reuse)
