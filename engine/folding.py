"""What a network computes anew in every layer and at every step, though it cannot have changed.

Two things, each replaced by the same operations done once, so that no bit changes, and a third,
where operations that stand together become one:

- *Offset norms* scale by one plus a weight, and add the one at each call. Here it is added when the
  model is loaded.
- *Angles.* Where the backend has no kernel for RoPE of its own, MLX builds it from a dozen
  operations, and all but the last few depend on the position alone. Layers that turn alike share
  them here, queries and keys too, for calls of one token: for chunks the share is not worth it.
- *Norms.* Where there is no kernel for them either, MLX builds each from thirteen operations, half
  of all in a step. For one token they are three here: MLX compiles what stands before and after the
  sum into one operation each. A compiler may contract what MLX rounds twice, so whether the bits
  are the same is tried before they are used.

A tiny model's step is made of such operations: each costs microseconds whatever it computes. What
is shared is a function of position and dtype, so no session, restored or not, can tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE

#: Positions and dtypes at which shared angles must give the bits of MLX's own before they are used.
_TRIED_POSITIONS = (0, 1, 4_095, 70_001)

#: Norms at which compiled ones must.
_TRIED_DIMS = 192
_TRIED_EPS = 1e-3
#: In single precision some of so many show a product and a sum that were rounded at once.
_TRIED_ROWS = 200


class OffsetNorm:
    """RMS norm by ``1 + weight``, the sum made once.

    Attributes:
        scale: ``[dim]``, one plus the weight.
        eps: Added to the mean square.
    """

    __slots__ = ("eps", "scale")

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.scale = 1.0 + weight
        self.eps = eps
        mx.eval(self.scale)

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` ``[..., dim]``, normed."""
        return mx.fast.rms_norm(x, self.scale, self.eps)


def _squares(x: mx.array) -> mx.array:
    return mx.square(x.astype(mx.float32))


def _scaled(
    x: mx.array, total: mx.array, share: mx.array, eps: mx.array, scale: mx.array
) -> mx.array:
    root = mx.rsqrt(total * share + eps)
    return (x.astype(mx.float32) * root).astype(x.dtype) * scale


#: One operation each, for all norms: what differs between them is given.
_COMPILED_SQUARES: Any = mx.compile(_squares)
_COMPILED_SCALED: Any = mx.compile(_scaled)


class QuickNorm:
    """A layer's RMS norm that takes a single token through three operations."""

    __slots__ = ("_eps", "_own", "_scale", "_share")

    def __init__(self, own: OffsetNorm | RMSNorm) -> None:
        """Stand in for ``own``."""
        scale = own.scale if isinstance(own, OffsetNorm) else own.weight
        # Of the token's own rank: nothing is left to be broadcast.
        self._scale = scale[None, None]
        self._share = mx.array([[[1.0 / scale.size]]], mx.float32)
        self._eps = mx.array([[[own.eps]]], mx.float32)
        self._own = own
        mx.eval(self._scale, self._share, self._eps)

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` ``[batch, tokens, dim]``, normed."""
        scale = self._scale
        if x.shape != scale.shape or x.dtype != scale.dtype:
            normed: mx.array = self._own(x)
            return normed
        total = mx.sum(_COMPILED_SQUARES(x), axis=-1, keepdims=True)
        quick: mx.array = _COMPILED_SCALED(x, total, self._share, self._eps, scale)
        return quick


class QuickAttention:
    """Muse's attention, whose norms of queries and keys take a single token as quickly.

    They have no weight: the factor of the queries stands in its place, and one in that of the keys.
    """

    __slots__ = ("_eps", "_own", "_scales", "_share", "layer_type")

    def __init__(self, own: Any, dtype: mx.Dtype) -> None:  # noqa: ANN401 - mlx-lm's, duck-typed
        """Stand in for ``own``."""
        self.layer_type = own.layer_type
        self._own = own
        self._share = mx.array([[[[1.0 / own.head_dim]]]], mx.float32)
        self._eps = mx.array([[[[own.eps]]]], mx.float32)
        self._scales = [mx.array([[[[by]]]], dtype) for by in (own.qk_scale_factor, 1.0)]
        mx.eval(self._share, self._eps, self._scales)

    def __call__(
        self,
        x: mx.array,
        mask: mx.array | str | None = None,
        cache: Any = None,  # noqa: ANN401
    ) -> mx.array:
        """``x`` ``[batch, tokens, dim]``, attended to what ``cache`` holds and itself."""
        own, scales = self._own, self._scales
        if x.shape[:2] != (1, 1) or x.dtype != scales[0].dtype or mask is not None or cache is None:
            attended: mx.array = own(x, mask, cache)
            return attended
        dim, at = own.head_dim, cache.offset
        queries = own.q_proj(x).reshape(1, 1, own.n_heads, dim)
        keys = own.k_proj(x).reshape(1, 1, own.n_kv_heads, dim)
        values = own.v_proj(x).reshape(1, 1, own.n_kv_heads, dim).transpose(0, 2, 1, 3)
        queries, keys = (
            self._normed(rows, by).transpose(0, 2, 1, 3)
            for rows, by in zip((queries, keys), scales, strict=True)
        )
        if own.use_rope:
            queries, keys = own.rope(queries, offset=at), own.rope(keys, offset=at)
        keys, values = cache.update_and_fetch(keys, values)
        seen = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=own.scale, mask=None
        )
        seen = seen.transpose(0, 2, 1, 3).reshape(1, 1, -1)
        gated: mx.array = own.o_proj(seen * mx.sigmoid(own.gate_proj(x)))
        return gated

    def _normed(self, rows: mx.array, scale: mx.array) -> mx.array:
        total = mx.sum(_COMPILED_SQUARES(rows), axis=-1, keepdims=True)
        normed: mx.array = _COMPILED_SCALED(rows, total, self._share, self._eps, scale)
        return normed


class Angles:
    """Cosines and sines of one position, for layers whose RoPE has these parameters."""

    __slots__ = ("_cosine", "_for", "_log_base", "_pairs", "_scale", "_sine", "_traditional")

    def __init__(self, rope: RoPE) -> None:
        self._pairs = rope.dims // 2
        self._log_base = math.log(rope.base)
        self._scale = rope.scale
        self._traditional = rope.traditional
        self._for: tuple[int, mx.Dtype] | None = None

    def at(self, position: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """``[1, dims]`` each, by the very operations of MLX's RoPE; those asked for last stay.

        Both stand at each of the two rows of a pair, the sine with the sign that it has there.
        Lazy: whoever uses them first computes them.
        """
        if self._for != (position, dtype):
            steps = mx.arange(0, -self._pairs, -1, dtype=mx.float32)
            frequencies = mx.exp(steps * mx.array(self._log_base / self._pairs, mx.float32))
            where = mx.arange(1, dtype=mx.float32) + mx.array(position, mx.int32)
            theta = (where * mx.array(self._scale, mx.float32))[:, None] * frequencies
            cosine, sine = mx.cos(theta).astype(dtype), mx.sin(theta).astype(dtype)
            self._cosine, self._sine = self._pair(cosine, cosine), self._pair(-sine, sine)
            self._for = (position, dtype)
        return self._cosine, self._sine

    def _pair(self, left: mx.array, right: mx.array) -> mx.array:
        """``[1, dims]``, as the rows of pairs lie in a head."""
        if self._traditional:
            return mx.stack([left, right], axis=-1).reshape(1, 2 * self._pairs)
        return mx.concatenate([left, right], axis=-1)


class SharedRope:
    """A layer's RoPE that takes the angles of a single token from where other layers find them."""

    __slots__ = ("_angles", "_own")

    def __init__(self, own: RoPE, angles: Angles) -> None:
        """Stand in for ``own``."""
        self._own = own
        self._angles = angles

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        """``x`` ``[batch, heads, tokens, head_dim]`` from position ``offset`` on, turned."""
        own = self._own
        if x.shape[2] != 1 or x.shape[3] != own.dims:
            turned: mx.array = own(x, offset=offset)
            return turned
        cosine, sine = self._angles.at(offset, x.dtype)
        half = own.dims // 2
        if own.traditional:
            other = x.reshape(*x.shape[:3], half, 2)[..., ::-1].reshape(x.shape)
        else:
            other = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
        # A product with the negated sine, added, is the product subtracted, to the last bit: MLX's
        # four products of half a head are two of a whole one.
        return x * cosine + other * sine


def fold(
    network: Module,
    offset_norms: Sequence[type[Module]],
    dtype: mx.Dtype,
    *,
    no_kernels: bool,
    attentions: Sequence[type[Module]] = (),
) -> None:
    """Replace what can be computed once, in place. The results of ``network`` keep every bit.

    Args:
        network: As loaded and cast; its norms leave its parameters.
        offset_norms: Classes whose call is an RMS norm by ``1 + weight``.
        dtype: Of the rows that RoPE turns.
        no_kernels: Whether MLX builds RoPE and norms from single operations here.
        attentions: Classes that are Muse's attention.
    """
    shared: dict[tuple[int, float, float], Angles] = {}
    is_quick = no_kernels and _same_norms()
    norm: Any = QuickNorm if is_quick else lambda own: own
    # Bound first: strict mypy refuses a direct call of an untyped function.
    named_modules: Any = network.named_modules
    for _, parent in named_modules():
        children: list[tuple[str, Any]] = list(parent.items())
        for name, child in children:
            if type(child) in offset_norms:
                setattr(parent, name, norm(OffsetNorm(child.weight, child.eps)))
            elif type(child) is RMSNorm:
                setattr(parent, name, norm(child))
            elif is_quick and type(child) in attentions:
                setattr(parent, name, QuickAttention(child, dtype))
            elif no_kernels and type(child) is RoPE:
                key = (child.dims, child.base, child.scale)
                rope = SharedRope(child, shared.setdefault(key, Angles(child)))
                if _same_bits(child, rope, dtype):
                    setattr(parent, name, rope)


def _same_bits(own: RoPE, shared: SharedRope, dtype: mx.Dtype) -> bool:
    """Whether MLX still builds RoPE as it is built here; another version may not."""
    x = (mx.arange(own.dims, dtype=mx.float32) / 7.0 - 1.0).astype(dtype)[None, None, None]
    return _all_same([(own(x, offset=at), shared(x, offset=at)) for at in _TRIED_POSITIONS])


def _same_norms() -> bool:
    """Whether compiled norms have the bits of MLX's own here; without a compiler there are none.

    Tried in single precision, too: halves hide most of what is rounded otherwise.
    """
    pairs = []
    for dtype, count in ((mx.float32, _TRIED_ROWS), (mx.float16, 16), (mx.bfloat16, 16)):
        own = RMSNorm(_TRIED_DIMS, _TRIED_EPS)
        own.weight = _spread(0, 1.0).astype(dtype)
        quick = QuickNorm(own)
        # From far below eps to far above it: where one of the two outweighs, rounding hides it.
        rows = [_spread(row, 0.01 * 1.02**row).astype(dtype)[None, None] for row in range(count)]
        pairs += [(own(x), quick(x)) for x in rows]
    try:
        return _all_same(pairs)
    except RuntimeError:
        return False


def _spread(row: int, size: float) -> mx.array:
    """``[dims]`` of numbers of about ``size`` that have no pattern; others in each row."""
    return size * mx.sin(mx.arange(_TRIED_DIMS, dtype=mx.float32) * (row + 1.7)) + size / 3.0


def _all_same(pairs: Sequence[tuple[mx.array, mx.array]]) -> bool:
    words = [(left.view(mx.uint8), right.view(mx.uint8)) for left, right in pairs]
    same: list[Any] = [mx.array_equal(left, right) for left, right in words]
    return all(one.item() for one in same)
