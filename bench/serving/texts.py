"""Text to ask with: English of no copyright, so that the trained model has something to say."""

from __future__ import annotations

import itertools
from typing import Final

from bench.serving.client import say
from bench.serving.processes import ROOT

OPENINGS: Final = (
    "It was a dark night and",
    "The captain looked at the sea and",
    "Tell me of the old house.",
    "She walked to the garden where",
)


def prose(round_: int, words: int) -> str:
    """``words`` words that begin as in no other round."""
    every = (ROOT / "examples" / "prompt.txt").read_text().split()
    start = (round_ * 397) % len(every)
    chosen = itertools.islice(itertools.cycle(every), start, start + words)
    return f"Chapter {round_ + 1}. {' '.join(chosen)}"


def asked(round_: int, words: int) -> list[dict[str, str]]:
    """One message of that length."""
    return [say("user", prose(round_, words))]
