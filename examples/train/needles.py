"""Evaluation prompts: a fact told, a stretch of an unseen novel, then the question."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dialogue import NOTED, Sequence
from facts import NAME, Kind, pick, value
from novels import Ids, Novel
from tokenizers import Tokenizer

STYLES = ("plain", "chat", "chat in one turn")


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt with its answer: the answer's tokens are ``ids[answer_start:]``."""

    ids: Ids
    answer_start: int


def make_needle(
    tokenizer: Tokenizer,
    novel: Novel,
    rng: np.random.Generator,
    *,
    style: str,
    distance: int,
    kind: Kind = NAME,
) -> Needle:
    """One needle; ``distance`` is the tokens between the end of the telling and the question.

    The value is one of those reserved for evaluation, the text between is of ``novel``.
    """
    start = int(rng.integers(len(novel.ids) - distance))
    content = value(kind, rng, reserved=True)
    tell, ask = pick(rng, kind.tells).format(content), pick(rng, kind.asks)
    filler = novel.ids[start : start + distance]
    sequence = Sequence(tokenizer)
    if style == "plain":
        sequence.text(f"{tell}\n\n", 1.0)
        sequence.add(filler[2:], 1.0)
        sequence.text(f"\n\n{ask} ", 1.0)
    elif style == "chat":
        sequence.text(f"<|bos|><|user|>{tell}<|end|><|assistant|>{pick(rng, NOTED)}<|end|>", 1.0)
        wrapped_in_turns(sequence, filler, rng)
        sequence.text(f"<|user|>{ask}<|end|><|assistant|>", 1.0)
    else:
        sequence.text(f"<|bos|><|user|>{tell}\n\n", 1.0)
        sequence.add(filler[2:], 1.0)
        sequence.text(f"\n\n{ask}<|end|><|assistant|>", 1.0)
    answer_start = sequence.length
    answer = kind.answer.format(content)
    if style == "plain":
        # The space belongs to the answer's first word, as in the tokens of the whole text.
        sequence = retokenised(sequence, f" {answer}")
        answer_start -= 1
    else:
        sequence.text(f"{answer}<|end|>", 1.0)
    return Needle(np.concatenate(sequence.pieces), answer_start)


def retokenised(sequence: Sequence, text: str) -> Sequence:
    """The sequence with its last token, a lone space, replaced by ``text``."""
    sequence.pieces[-1] = sequence.pieces[-1][:-1]
    sequence.length -= 1
    sequence.text(text, 1.0)
    return sequence


def wrapped_in_turns(sequence: Sequence, filler: Ids, rng: np.random.Generator) -> None:
    """Add the filler as alternating user and assistant turns of 100 to 800 tokens each."""
    place = 0
    role = "user"
    while place < len(filler):
        step = int(rng.integers(100, 800))
        sequence.text(f"<|{role}|>", 1.0)
        sequence.add(filler[place : place + step], 1.0)
        sequence.text("<|end|>", 1.0)
        place += step
        role = "assistant" if role == "user" else "user"
    if role == "assistant":
        sequence.text("<|assistant|>I will remember that.<|end|>", 1.0)


def needle_batch(needles: list[Needle], tokens: int) -> tuple[Ids, Ids]:
    """Ids padded to [needles, tokens], and answer masks of the same shape.

    The padding follows the answer, which a causal model cannot see.

    Raises:
        ValueError: A needle is longer than ``tokens``.
    """
    ids = np.zeros((len(needles), tokens), dtype=np.int64)
    answers = np.zeros((len(needles), tokens), dtype=np.int64)
    for row, needle in enumerate(needles):
        if len(needle.ids) > tokens:
            raise ValueError(f"a needle has {len(needle.ids)} tokens, there is room for {tokens}")
        ids[row, : len(needle.ids)] = needle.ids
        answers[row, needle.answer_start : len(needle.ids)] = 1
    return ids, answers
