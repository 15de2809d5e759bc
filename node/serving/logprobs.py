"""Probabilities of a token as the model gave them, before any sampling parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.serving.order import TokenLogprob

if TYPE_CHECKING:
    from engine import Logits


def token_logprob(logits: Logits, token_id: int, top: int) -> TokenLogprob:
    """The chosen token's logarithm of probability, and that of the ``top`` most probable ones.

    Ties stand in the order of ids. Blocking: for a large vocabulary this takes milliseconds, and
    any thread may do it.
    """
    import numpy as np

    values = logits.values().astype(np.float64)
    largest = values.max()
    values -= largest + np.log(np.exp(values - largest).sum())
    best: list[int] = []
    if top:
        edge = np.partition(values, values.size - top)[values.size - top]
        candidates = np.flatnonzero(values >= edge)
        best = candidates[np.argsort(-values[candidates], kind="stable")][:top].tolist()
    return TokenLogprob(
        token_id, float(values[token_id]), tuple((i, float(values[i])) for i in best)
    )
