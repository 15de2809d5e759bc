"""The same conversation cold, warm, restored after ``kill -9`` and moved: is it the same text?

One conversation is never disturbed (warm: it goes on in its live session), of a second one the node
is killed before the last turn and restarted (restored), a third one is handed over with ``kvnode
migrate`` before the last turn (moved), and a node computes the whole chat from nothing (whole). The
first three computed their rows by the same calls,
so texts must be equal. The last one computes it by other calls, whose bits may differ: whether
its text agrees is told, and nothing is promised. Where the schedules agree, which is asked apart
(a cold prompt, and again from the cut at its end after the restart), it must be equal.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.serving import processes
from bench.serving.client import chat, say
from bench.serving.processes import ROOT, TRAINED, Server
from bench.serving.restart import settled
from bench.serving.rows import Row
from bench.serving.texts import asked, prose
from node.config import child_environment
from node.demo.stage import CLIENT, SOURCE, TARGET, Stage, set_stage

TURNS: Final = (prose(0, 200), "Who came to the door?", "And then? Tell me all.")
TOKENS: Final = 48
CHOICES: Final[dict[str, dict[str, Any]]] = {
    "temperature 0": {"temperature": 0},
    "temperature 0.8, seed 7": {"temperature": 0.8, "seed": 7},
}
_MOVE_S: Final = 120.0


@dataclass
class Texts:
    """The last answer of one conversation, by how it came about; and that of a single prompt."""

    fields: dict[str, Any]
    warm: str = ""
    restored: str = ""
    moved: str = ""
    whole: str = ""
    cold: str = ""
    from_cut: str = ""
    known: list[dict[str, str]] = field(default_factory=list)
    waiting: str = ""

    def row(self, name: str) -> Row:
        """What of it is not equal."""
        pairs = {
            "restored": (self.restored, self.warm), "moved": (self.moved, self.warm),
            "cold prompt": (self.from_cut, self.cold),
        }  # fmt: skip
        unlike = [key for key, (left, right) in pairs.items() if left != right]
        whole = f"equal for {_common(self.whole, self.warm)} of {len(self.warm)} characters"
        note = (
            f"different: {', '.join(unlike) or 'none'}; computed whole, by other calls: "
            f"{'equal' if self.whole == self.warm else whole}"
        )
        return Row(
            f"texts that differ, {name}", "of restored, moved, cold prompt", (len(unlike),),
            "<=", 0, note,
        )  # fmt: skip


def same_texts(folder: Path) -> Iterator[Row]:
    """Both ways to choose tokens."""
    every = {name: Texts(fields) for name, fields in CHOICES.items()}
    with processes.node(folder / "data") as node:
        for index, texts in enumerate(every.values()):
            conversation = _first_turns(node, texts.fields)
            texts.warm = _turn(node, conversation, TURNS[-1], texts.fields)
            texts.known = _items(node, conversation)
            texts.waiting = _first_turns(node, texts.fields)
            texts.cold = _prompt(node, index, texts)
        settled(node)
        node.kill()
    with processes.node(folder / "data") as node:
        for index, texts in enumerate(every.values()):
            texts.restored = _turn(node, texts.waiting, TURNS[-1], texts.fields)
            texts.from_cut = _prompt(node, index, texts)
    stage = set_stage(folder / "moved", TRAINED, None)
    with _enrolled(stage, SOURCE) as source, _enrolled(stage, TARGET) as target:
        for texts in every.values():
            texts.moved = _moved(stage, source, target, texts.fields)
            cold = chat(target, texts.known, TOKENS, cache_prompt=False, **texts.fields)
            texts.whole = asyncio.run(cold).text
    for name, texts in every.items():
        yield texts.row(name)


def _prompt(node: Server, index: int, texts: Texts) -> str:
    """The answer to a prompt of its own."""
    return asyncio.run(chat(node, asked(index + 3, 150), TOKENS, **texts.fields)).text


def _first_turns(node: Server, fields: dict[str, Any]) -> str:
    """A conversation of all turns but the last; its id."""
    name = str(node.json("/v1/conversations", {})["id"])
    for text in TURNS[:-1]:
        _turn(node, name, text, fields)
    return name


def _turn(node: Server, conversation: str, text: str, fields: dict[str, Any]) -> str:
    body = {
        "model": "default_model", "conversation": conversation, "input": text,
        "max_output_tokens": TOKENS, **fields,
    }  # fmt: skip
    answer = node.json("/v1/responses", body)
    return str(answer["output"][0]["content"][0]["text"])


def _items(node: Server, conversation: str) -> list[dict[str, str]]:
    """What was said but the last answer, as chat messages."""
    listed = node.json(f"/v1/conversations/{conversation}/items?order=asc&limit=100")["data"]
    return [say(item["role"], item["content"][0]["text"]) for item in listed[:-1]]


def _moved(stage: Stage, source: Server, target: Server, fields: dict[str, Any]) -> str:
    name = _first_turns(source, fields)
    command = [
        *(sys.executable, "-P", "-m", "node", "migrate", name),
        *("--node", f"{SOURCE}@{source.grpc}", "--to", f"{TARGET}@{target.grpc}"),
        *("--credentials", str(stage.credentials(CLIENT))),
    ]
    environment = child_environment(ROOT)
    subprocess.run(command, check=True, capture_output=True, timeout=_MOVE_S, env=environment)
    return _turn(target, name, TURNS[-1], fields)


def _enrolled(stage: Stage, name: str) -> Any:
    return processes.node(
        stage.work / f"{name}-data",
        *("--grpc", "127.0.0.1:0", "--credentials", str(stage.credentials(name))),
        *("--directory", f"sqlite:{stage.work / 'directory.sqlite'}"),
    )


def _common(left: str, right: str) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
