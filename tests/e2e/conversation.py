"""A conversation with the trained model, as its card says that it can hold one."""

from __future__ import annotations

import zlib
from pathlib import Path

from e2e_support import ROOT

#: The one in eight that training never saw (examples/train/facts.py).
NAME = "Eleanor Lockwood"
assert zlib.crc32(NAME.encode()) % 8 == 0

ANSWER = f"Your name is {NAME}.<|end|>"

TELLING = f"<|bos|><|user|>My name is {NAME}.<|end|><|assistant|>I will remember that.<|end|>"
QUESTION = "<|user|>What is my name?<|end|><|assistant|>"
QUESTION_AGAIN = "<|user|>Please tell me, what is my name?<|end|><|assistant|>"
OTHER_TURN = "<|user|>Where do I live?<|end|><|assistant|>"

#: Tokens of each turn between the telling and the question.
TURN_TOKENS = 512

#: The card's end tokens, and more tokens than the answer has.
END_TOKENS = (2, 6)
ANSWER_TOKENS = 24

MODEL = ROOT / "examples" / "models" / "muse-novels-6m"


def told_long_ago(encode, between_tokens: int) -> list[int]:
    """Tokens of a telling and of so many tokens of story after it, as turns of both sides."""
    story = encode((ROOT / "examples" / "prompt.txt").read_text("utf-8"))
    filler = (story * (1 + between_tokens // len(story)))[:between_tokens]
    ids = encode(TELLING)
    for number, place in enumerate(range(0, between_tokens, TURN_TOKENS)):
        role = ("user", "assistant")[number % 2]
        ids += encode(f"<|{role}|>") + filler[place : place + TURN_TOKENS] + encode("<|end|>")
    return ids


def until_end(token_ids: list[int]) -> list[int]:
    """The answer with its end token, without what a model says after it."""
    ends = [place for place, one in enumerate(token_ids) if one in END_TOKENS]
    return token_ids[: ends[0] + 1] if ends else token_ids


def common_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens two conversations begin with together."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def read_pack(model, path: Path, key) -> tuple[list[int], object]:
    """Token ids of a pack, and its rows installed into ``model``."""
    from kvpack.bundle import BundleReader, read_snapshot
    from kvpack.keys import Keyring

    with BundleReader.open(path, Keyring([key])) as reader:
        snapshot = read_snapshot(reader)
        schedule = reader.manifest.schedule
    installer = model.installer(snapshot.position)
    for tile in snapshot.tiles:
        installer.scatter(tile)
    return list(snapshot.token_ids), installer.finish(schedule)


def answer(generation, token_ids: list[int]) -> tuple[list[int], list[bytes]]:
    """Feed ``token_ids`` one by one and decode greedily: the answer, and every logits' digest."""
    logits = [generation.step(one) for one in token_ids]
    chosen = [logits[-1].argmax()]
    while chosen[-1] not in END_TOKENS and len(chosen) < ANSWER_TOKENS:
        logits.append(generation.step(chosen[-1]))
        chosen.append(logits[-1].argmax())
    return chosen, [one.digest() for one in logits]
