"""The logits of one call, left in MLX's memory until somebody asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.dtypes import encoding_of, host_words
from engine.logits import Logits


@dataclass(frozen=True, slots=True)
class _Row:
    """One token's logits within those of a call.

    Attributes:
        words: ``[1, count, vocab_size]``, evaluated; nobody writes to them.
        index: Which of the ``count``.
    """

    words: mx.array
    index: int

    def read(self) -> bytes:
        row: bytes = np.array(self.words, copy=False)[0, self.index].tobytes()
        return row


class CallLogits:
    """The logits of one call, and the greedy token after each of its tokens: lazy until evaluated.

    The choice is made where the logits are: on a GPU bringing them to the host costs more than a
    tiny layer, and greedy decoding needs one number of them.
    """

    __slots__ = ("_best", "_encoding", "_words")

    def __init__(self, logits: mx.array) -> None:
        """Of ``logits`` ``[1, count, vocab_size]``."""
        self._encoding = encoding_of(logits.dtype)
        self._words = host_words(logits)
        self._best = mx.argmax(logits, axis=-1)

    def arrays(self) -> list[mx.array]:
        """What has to be evaluated before :meth:`split`."""
        return [self._words, self._best]

    def split(self) -> tuple[Logits, ...]:
        """One value per token of the call."""
        # A single number has a way to the host of its own, which is the quicker one on a GPU.
        best: Any = [self._best.item()] if self._best.size == 1 else self._best[0].tolist()
        return tuple(
            Logits.left_in(_Row(self._words, index), self._encoding, token)
            for index, token in enumerate(best)
        )
