"""Attention over a full history, with the window as a mask and optional sinks.

**Window rule.** The query at position p sees the keys of positions ``p - window + 1 … p``, its own
among them. Without a window it sees ``0 … p``. A masked key gets the score minus infinity, so its
weight is exactly zero.

**Sinks.** A sink is a score per query head that takes part in the softmax without a value: it takes
weight away from the keys and adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.oracle.geometry import Geometry
from engine.oracle.operators import Doubles, Floats, Linear, Transform, rounded, sigmoid
from engine.oracle.plane import HistoryPlane
from engine.oracle.rope import Rope

#: Queries per score matrix: bounds its memory to heads x 256 x keys x 8 bytes.
QUERY_BLOCK = 256


def visible(
    first_query: int, end_query: int, first_key: int, window: int | None
) -> npt.NDArray[np.bool_]:
    """Which keys ``first_key … end_query - 1`` each query of ``[first_query, end_query)`` sees.

    Returns:
        ``[queries, keys]``.
    """
    queries = np.arange(first_query, end_query)[:, None]
    keys = np.arange(first_key, end_query)[None, :]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def attend(
    queries: Floats,
    plane: HistoryPlane,
    first_query: int,
    window: int | None,
    scale: float,
    sinks: Doubles | None = None,
) -> Floats:
    """Softmax attention of new queries over the plane, which already holds their own rows.

    Args:
        queries: ``[tokens, heads, key_dim]``; query head h reads key head
            ``h // (heads / kv_heads)``.
        plane: The layer's rows.
        first_query: Position of the first query.
        window: The layer's window in tokens, None for full.
        scale: Factor on the scores.
        sinks: ``[heads]`` or None.

    Returns:
        ``[tokens, heads, value_dim]``.
    """
    blocks = []
    for begin in range(0, len(queries), QUERY_BLOCK):
        block = queries[begin : begin + QUERY_BLOCK]
        first, end = first_query + begin, first_query + begin + len(block)
        # Keys before the oldest one that any query of the block sees are not even read: a restored
        # plane does not hold them, and a fresh one must give the same bits.
        oldest = 0 if window is None else max(0, first - window + 1)
        keys, values = plane.rows(oldest, end)
        mask = visible(first, end, oldest, window)
        blocks.append(_attend_block(block, keys, values, mask, scale, sinks))
    return np.concatenate(blocks)


def _attend_block(
    queries: Floats,
    keys: Floats,
    values: Floats,
    mask: npt.NDArray[np.bool_],
    scale: float,
    sinks: Doubles | None,
) -> Floats:
    tokens, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.astype(np.float64).reshape(tokens, kv_heads, heads // kv_heads, -1)
    by_head = grouped.transpose(1, 2, 0, 3)  # [kv_heads, group, tokens, key_dim]
    turned_keys = keys.astype(np.float64).transpose(1, 2, 0)[:, None]  # [kv_heads, 1, key_dim, S]
    scores = np.where(mask, by_head @ turned_keys * scale, -np.inf)
    per_head = None if sinks is None else sinks.reshape(kv_heads, heads // kv_heads, 1, 1)
    weights = _softmax(scores, per_head)
    mixed = weights @ values.astype(np.float64).transpose(1, 0, 2)[:, None]
    return rounded(mixed.transpose(2, 0, 1, 3).reshape(tokens, heads, -1))


def _softmax(scores: Doubles, sinks: Doubles | None) -> Doubles:
    """Softmax over the last axis, with one more score per row that is then left out."""
    largest = np.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    powers = np.exp(scores - largest)
    total = np.sum(powers, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - largest)
    result: Doubles = powers / total
    return result


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Projections:
    """The four projections that every attention has.

    Attributes:
        query: ``hidden`` to all query heads.
        key: ``hidden`` to all key heads.
        value: ``hidden`` to all value heads.
        output: All query heads to ``hidden``.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Attention:
    """One layer's attention: project, norm, turn, store, attend, gate, project.

    ``q = rope(query_factor · norm_q(x W_q))``, ``k = rope(norm_k(x W_k))``, ``v = x W_v``;
    ``y = (attend(q, K, V) · sigmoid(x W_g)) W_o``. Every piece that is None is left out.

    Attributes:
        projections: ``W_q, W_k, W_v, W_o``.
        size: Heads and their width.
        scale: Factor on the scores.
        window: Window in tokens, None for full.
        rope: Rotation of queries and keys, None for NoPE.
        query_norm: Norm of the queries before the rotation.
        key_norm: Norm of the keys before the rotation.
        norm_per_head: The norms see one head at a time; else the whole projection.
        query_factor: Factor on the normed queries.
        gate: Projection whose sigmoid scales the attention's result.
        sinks: ``[heads]``.
    """

    projections: Projections
    size: Geometry
    scale: float
    window: int | None = None
    rope: Rope | None = None
    query_norm: Transform | None = None
    key_norm: Transform | None = None
    norm_per_head: bool = True
    query_factor: float = 1.0
    gate: Linear | None = None
    sinks: Doubles | None = None

    def __call__(self, x: Floats, plane: HistoryPlane, first_position: int) -> Floats:
        """``x`` ``[tokens, hidden]`` of positions ``first_position …``; their rows are stored."""
        made, kv_heads = self.projections, self.size.kv_heads
        queries = self._split(made.query(x), self.size.heads, self.query_norm)
        if self.query_factor != 1.0:
            queries = rounded(queries.astype(np.float64) * self.query_factor)
        keys = self._split(made.key(x), kv_heads, self.key_norm)
        if self.rope is not None:
            queries, keys = self.rope(queries, first_position), self.rope(keys, first_position)
        plane.write(first_position, keys, self._split(made.value(x), kv_heads, None))
        mixed = attend(queries, plane, first_position, self.window, self.scale, self.sinks)
        return made.output(self._gated(mixed.reshape(len(x), -1), x))

    def _split(self, projected: Floats, heads: int, norm: Transform | None) -> Floats:
        """``[tokens, heads x head_dim]`` as ``[tokens, heads, head_dim]``, normed on the way."""
        if norm is not None and not self.norm_per_head:
            projected = norm(projected)
        split = projected.reshape(len(projected), heads, self.size.head_dim)
        return norm(split) if norm is not None and self.norm_per_head else split

    def _gated(self, mixed: Floats, x: Floats) -> Floats:
        if self.gate is None:
            return mixed
        openness = sigmoid(self.gate(x).astype(np.float64))
        return rounded(mixed.astype(np.float64) * openness)
