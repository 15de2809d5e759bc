"""What all architectures are made of: embedding, a stack of residual blocks, a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.oracle.attention import Attention
from engine.oracle.operators import Doubles, Floats, Linear, Transform, plus, rounded, softcapped
from engine.oracle.plane import HistoryPlane
from engine.oracle.rope import Rope, f64_bits
from kvpack.layout import LayerKind, LayerLayout, RopeLayout


class Block(Protocol):
    """One layer: activations in, activations out, its rows stored in its plane."""

    @property
    def attention(self) -> Attention:
        """The layer's attention, which also states the shape of its rows."""
        ...

    def __call__(self, x: Floats, plane: HistoryPlane, first_position: int) -> Floats:
        """``x`` ``[tokens, hidden]`` of positions ``first_position …``."""
        ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SequentialBlock:
    """``h = x + N2(attention(N1(x)))``, ``y = h + N4(mlp(N3(h)))``.

    A norm that is None is left out. With N1 and N3 alone it is a pre-norm layer, with N2 and N4
    alone a post-norm layer, with all four a sandwich.
    """

    attention: Attention
    mlp: Transform
    before_attention: Transform | None = None
    after_attention: Transform | None = None
    before_mlp: Transform | None = None
    after_mlp: Transform | None = None

    def __call__(self, x: Floats, plane: HistoryPlane, first_position: int) -> Floats:
        """See :class:`Block`."""
        attended = self.attention(_maybe(self.before_attention, x), plane, first_position)
        middle = plus(x, _maybe(self.after_attention, attended))
        fed = self.mlp(_maybe(self.before_mlp, middle))
        return plus(middle, _maybe(self.after_mlp, fed))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ParallelBlock:
    """``y = x + attention(N(x)) + mlp(N(x))``: both parts read one norm."""

    attention: Attention
    mlp: Transform
    norm: Transform

    def __call__(self, x: Floats, plane: HistoryPlane, first_position: int) -> Floats:
        """See :class:`Block`."""
        normed = self.norm(x)
        attended = self.attention(normed, plane, first_position)
        return plus(plus(attended, self.mlp(normed)), x)


def _maybe(norm: Transform | None, x: Floats) -> Floats:
    return x if norm is None else norm(x)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Embedding:
    """``h = table[ids] · scale``, then a norm where there is one.

    Attributes:
        table: ``[vocab, hidden]``.
        scale: Factor on the rows.
        norm: Applied to the scaled rows, or None.
    """

    table: Floats
    scale: float = 1.0
    norm: Transform | None = None

    def __call__(self, token_ids: npt.NDArray[np.int64]) -> Floats:
        """``[tokens]`` ids to ``[tokens, hidden]``."""
        rows = self.table[token_ids]
        if self.scale != 1.0:
            rows = rounded(rows.astype(np.float64) * self.scale)
        return _maybe(self.norm, rows)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Head:
    """``logits = cap · tanh(norm(h) Wᵀ · scale / cap)``; without a cap just ``norm(h) Wᵀ · scale``.

    Attributes:
        norm: The final norm.
        projection: ``hidden`` to ``vocab``.
        scale: Factor on the logits.
        cap: Soft cap, or None.
    """

    norm: Transform
    projection: Linear
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, h: Floats) -> Floats:
        """``[tokens, hidden]`` to ``[tokens, vocab]``."""
        exact: Doubles = self.projection.exact(self.norm(h).astype(np.float64))
        logits = rounded(exact * self.scale)
        return logits if self.cap is None else softcapped(logits, self.cap)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Decoder:
    """A whole model, without any state.

    Attributes:
        embedding: Ids to activations.
        blocks: The layers, in order.
        head: Activations to logits.
    """

    embedding: Embedding
    blocks: tuple[Block, ...]
    head: Head

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return len(self.embedding.table)

    def layer_layouts(self) -> tuple[LayerLayout, ...]:
        """The shape of every layer's rows, as the math above stores them."""
        return tuple(layer_layout(block.attention) for block in self.blocks)

    def forward(
        self, token_ids: Sequence[int], planes: Sequence[HistoryPlane], first_position: int
    ) -> Floats:
        """Activations ``[tokens, hidden]`` before the head; rows are stored in ``planes``."""
        h = self.embedding(np.asarray(token_ids, np.int64))
        for block, plane in zip(self.blocks, planes, strict=True):
            h = block(h, plane, first_position)
        return h


def layer_layout(attention: Attention) -> LayerLayout:
    """The rows that ``attention`` stores."""
    kind = LayerKind.FULL if attention.window is None else LayerKind.SWA
    return LayerLayout(
        kind,
        attention.window,
        attention.size.kv_heads,
        attention.size.head_dim,
        attention.size.head_dim,
        None if attention.rope is None else rope_layout(attention.rope),
    )


def rope_layout(rope: Rope) -> RopeLayout:
    """The rotation as the layout states it."""
    return RopeLayout(f64_bits(rope.theta), rope.dims, rope.interleaved, rope.scaling)
