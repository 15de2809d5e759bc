"""A network whose logits are exact whatever the call's shape, and drafts that follow a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from engine.cache import PlaneCache
from engine.draft import Proposal
from engine.generation import Generation, empty_planes
from engine.origins import PlaneLayout
from engine.sampling import Distribution
from engine.sampling_state import SamplerState
from engine.speculative import Round
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout

WINDOW = 8
VOCAB = 53
CONTEXT = 4096


def counting_layout(window: int = WINDOW, context: int = CONTEXT) -> CacheLayout:
    return CacheLayout(
        (
            LayerLayout(LayerKind.SWA, window, 1, 2, 1),
            LayerLayout(LayerKind.FULL, None, 1, 2, 1),
        ),
        Encoding.F32LE,
        context,
    )


@dataclass
class CountingNetwork:
    """Next token from sums of the visible tokens: small integers, so every order gives equal bits.

    A row that should not be visible, or one that is missing, changes what is said. Rows hold the
    token and its position.
    """

    layout: CacheLayout
    multiplier: int = 7
    sharpness: float = 8.0
    plane_layout: PlaneLayout = PlaneLayout.HEAD_MAJOR
    vocab_size: int = VOCAB

    def new_generation(self) -> Generation:
        return Generation(self, empty_planes(self))

    def forward(self, token_ids: mx.array, caches: Sequence[PlaneCache]) -> mx.array:
        count = token_ids.shape[1]
        start = caches[0].offset
        positions = mx.arange(start, start + count)
        rows = mx.stack([token_ids[0], positions], axis=-1).astype(mx.float32)[None, None]
        masks = [cache.make_mask(count) for cache in caches]
        mixed = mx.zeros((count,))
        for weight, (cache, mask) in enumerate(zip(caches, masks, strict=True), start=1):
            keys, _ = cache.update_and_fetch(rows, rows[..., :1])
            mixed = mixed + weight * _visible_sums(keys, mask, count)
        said = (self.multiplier * mixed + positions).astype(mx.int32) % self.vocab_size
        distance = (mx.arange(self.vocab_size)[None] - said[:, None]) % self.vocab_size
        return -distance.astype(mx.float32)[None] / self.sharpness


def _visible_sums(keys: mx.array, mask: mx.array | str | None, count: int) -> mx.array:
    """Sum of token plus position over the rows that each query sees."""
    values = keys[0, 0].sum(axis=-1)
    rows = values.shape[0]
    if mask is None:
        return mx.broadcast_to(values.sum(), (count,))
    if isinstance(mask, str):
        mask = mx.arange(rows)[None] <= (rows - count + mx.arange(count))[:, None]
    return mx.where(mask, values[None], 0.0).sum(axis=-1)


@dataclass
class ScriptedDraft:
    """Knows what the target will say and is wrong at place ``wrong_at``, if that is proposed."""

    truth: Sequence[int]
    prompt_tokens: int
    wrong_at: int
    vocab: int = VOCAB

    def propose(self, token_ids: Sequence[int], count: int, sampler: SamplerState) -> Proposal:
        said = list(self.truth[len(token_ids) - self.prompt_tokens :][:count])
        if self.wrong_at < len(said):
            said[self.wrong_at] = (said[self.wrong_at] + 1) % self.vocab
        return Proposal(tuple(said), tuple(map(Distribution.point, said)), sampler.stream)

    def catch_up(self, token_ids: Sequence[int]) -> None: ...
    def reach(self, kept_tokens: int) -> None: ...
    def accept(self, kept_tokens: int) -> None: ...
    def abandon(self) -> None: ...


NETWORK = CountingNetwork(counting_layout())


def prompt(count: int) -> list[int]:
    return [(i * i + 3 * i) % VOCAB for i in range(count)]


def begun(network: CountingNetwork, ids: Sequence[int]) -> Generation:
    generation = network.new_generation()
    if len(ids) > 1:
        generation.prefill(ids[:-1])
    return generation


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for one in rounds for token in one.token_ids]
