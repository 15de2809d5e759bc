"""The corpus: public-domain novels, which of them are held out, and their tokens."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# Held out entirely: neither the tokenizer nor any model is trained on it, nor is anything tuned
# on it. Chosen before the first run: no other book of its author is in the corpus.
HELD_OUT = "treasure-island-120.txt"
# Held out while dropout and the like were chosen; the final run trains on it.
VALIDATION = "alice-s-adventures-in-wonderland-11.txt"

TITLES = {
    "a-tale-of-two-cities-98.txt": ("A Tale of Two Cities", "Charles Dickens"),
    "alice-s-adventures-in-wonderland-11.txt": (
        "Alice's Adventures in Wonderland",
        "Lewis Carroll",
    ),
    "emma-158.txt": ("Emma", "Jane Austen"),
    "great-expectations-1400.txt": ("Great Expectations", "Charles Dickens"),
    "grimms-fairy-tales-2591.txt": ("Grimms' Fairy Tales", "Jacob and Wilhelm Grimm"),
    "moby-dick-or-the-whale-2701.txt": ("Moby-Dick", "Herman Melville"),
    "pride-and-prejudice-1342.txt": ("Pride and Prejudice", "Jane Austen"),
    "the-adventures-of-sherlock-holmes-1661.txt": (
        "The Adventures of Sherlock Holmes",
        "Arthur Conan Doyle",
    ),
    "the-adventures-of-tom-sawyer-74.txt": ("The Adventures of Tom Sawyer", "Mark Twain"),
    "treasure-island-120.txt": ("Treasure Island", "Robert Louis Stevenson"),
}

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph of a novel: token range [start, end) in ``Novel.ids``, and its words."""

    start: int
    end: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Novel:
    """One novel as tokens: ``starts`` is where paragraphs begin, ``gaps`` where words end.

    A gap is a token that begins with white space, so text may be cut before it.
    """

    name: str
    characters: int
    ids: Ids
    starts: Ids
    gaps: Ids
    paragraphs: tuple[Paragraph, ...]


def training_names(without_validation: bool) -> list[str]:
    """Names of the files trained on, in a fixed order."""
    left_out = {HELD_OUT} | ({VALIDATION} if without_validation else set())
    return sorted(name for name in TITLES if name not in left_out)


def read_text(corpus: Path, name: str) -> str:
    """The text of one novel, line ends and all."""
    return (corpus / name).read_text(encoding="utf-8")


def corpus_digest(corpus: Path, names: list[str]) -> str:
    """SHA-256 over names and bytes, so that a card can say which text was used."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (corpus / name).read_bytes() + b"\0")
    return digest.hexdigest()


def load_novel(corpus: Path, name: str, tokenizer: Tokenizer) -> Novel:
    """Tokenise one novel whole and find its paragraphs."""
    text = read_text(corpus, name)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    offsets = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
    breaks = [match.end() for match in re.finditer(r"\n\n+(?=\S)", text)]
    starts = np.searchsorted(offsets, np.array([0, *breaks]))
    paragraphs = []
    for start, end in pairwise(starts):
        if 40 <= end - start <= 300:
            piece = text[offsets[start] : offsets[end]]
            words = tuple(sorted(set(re.findall(r"\b[a-z]{5,9}\b", piece))))
            if words:
                paragraphs.append(Paragraph(int(start), int(end), words))
    ids = np.array(encoding.ids, dtype=np.int64)
    gaps = np.flatnonzero([token[0] in "ĠĊ" for token in encoding.tokens])
    return Novel(name, len(text), ids, starts, gaps, tuple(paragraphs))
