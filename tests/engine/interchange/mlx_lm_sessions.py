"""Sessions of mlx-lm itself: nothing here knows of packs, and the fresh process imports it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load_model as load_network

W = 64

#: Calls of mlx-lm that lead to a cache, as their sizes: every state a ring can be in.
HISTORIES: dict[str, list[int]] = {
    "one token": [1],
    "filling, by prefill": [30],
    "filling, spare rows": [30, *[1] * 10],
    "W-1, by prefill": [W - 1],
    "W, by prefill": [W],
    "W+1, by prefill": [W + 1],
    "W-1, by steps": [32, *[1] * (W - 33)],
    "W, by steps": [32, *[1] * (W - 32)],
    "W+1, by steps": [32, *[1] * (W - 31)],
    "wide, first call": [150],
    "wide, W+S-1 rows": [100, 50],
    "wide, out of a turned ring": [150, *[1] * 40, 24],
    "ring, after decodes": [150, *[1] * 40],
    "ring, head at 0 again": [150, *[1] * W],
    "ring, twice round": [70, *[1] * (W + 37)],
    "growth step": [255, 1],
    "over the growth step": [256, 1],
}
#: Every state of a ring, and the two sides of its edge and of a growth step.
MAIN = [
    "filling, by prefill",
    "filling, spare rows",
    "W, by steps",
    "W+1, by steps",
    "wide, W+S-1 rows",
    "wide, out of a turned ring",
    "ring, after decodes",
    "ring, head at 0 again",
    "over the growth step",
]
#: For the other models: one of each state.
FEWER = ["filling, spare rows", "W, by steps", "wide, W+S-1 rows", "ring, after decodes"]

RAW_STEPS, CHUNK_TOKENS, STEPS_AFTER_CHUNK = 16, 24, 4


def tokens(count: int, salt: int = 0) -> list[int]:
    """A fixed stream of byte tokens without a short period."""
    return [(i * i * 31 + i * 17 + salt * 101 + 5) % 251 for i in range(count)]


class MlxLmSession:
    """A network of mlx-lm and its own cache."""

    def __init__(self, network: Any, cache: list[Any] | None = None) -> None:
        self.network = network
        self.cache = make_prompt_cache(network) if cache is None else cache

    @classmethod
    def loaded(cls, network: Any, path: Path) -> MlxLmSession:
        return cls(network, load_prompt_cache(str(path)))

    def call(self, token_ids: Sequence[int]) -> np.ndarray:
        """Bits of the last logits of one call."""
        logits = self.network(mx.array([list(token_ids)]), cache=self.cache)[0, -1]
        mx.eval(logits, *[part for cache in self.cache for part in cache.state[:2]])
        word = mx.uint32 if logits.dtype == mx.float32 else mx.uint16
        return np.array(logits.view(word))

    def feed(self, token_ids: Sequence[int], calls: Sequence[int]) -> None:
        done = 0
        for size in calls:
            self.call(token_ids[done : done + size])
            done += size
        assert done == len(token_ids)

    def save(self, path: Path) -> None:
        save_prompt_cache(str(path), self.cache, {"model": "here", "tokenizer_config": "{}"})

    def continuation(self) -> bytes:
        """Raw logits of 16 teacher-forced decodes, a chunk, and four more."""
        after = tokens(STEPS_AFTER_CHUNK, salt=5)
        calls = [[token] for token in tokens(RAW_STEPS, salt=3)]
        calls += [tokens(CHUNK_TOKENS, salt=9), *([token] for token in after)]
        return b"".join(self.call(call).tobytes() for call in calls)


def network_of(folder: Path) -> Any:
    network, _ = load_network(folder)
    return network


def saved_bytes(session: MlxLmSession) -> bytes:
    """What ``save_prompt_cache`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        session.save(path)
        return path.read_bytes()
