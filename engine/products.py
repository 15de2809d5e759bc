"""Products of one token with a matrix of halves, through single precision: the same bits, sooner.

MLX's CPU backend multiplies halves element by element, which takes several times as long as the
product in single precision. A product of two halves is exact in single precision (of bfloat16
within its range), and where both kernels add up in the order in which the products stand, and
round once at the end, the sums are the same bits. Whether they do is tried on this machine before
it is relied on, with sums that cancel: what is left of each is how it was rounded on the way,
which another order changes.

Only calls of one token gain. For them a second copy of the matrix is kept, in single precision and
in the order in which it is read; what all copies of a network may take is bounded.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

#: What the copies of one network may take, bytes. Without room for all linear layers there is none.
COPY_BYTES_MAX: Final = 1 << 30

#: Below so many elements the two conversions cost more than the product saves.
_ELEMENTS_MIN: Final = 1 << 15

_HALVES: Final = (mx.float16, mx.bfloat16)

#: Shapes ``(outputs, half the inputs)`` of the trial: sides that no kernel's step divides, and one
#: as large as layers are, since libraries choose kernels by size.
_TRIED: Final = ((601, 33), (257, 517), (67, 2_309), (19, 10_007), (4_099, 289))


class Budget:
    """Bytes that copies may still take."""

    __slots__ = ("left",)

    def __init__(self, left: int = COPY_BYTES_MAX) -> None:
        self.left = left

    def take(self, weight: mx.array) -> bool:
        """Whether there is room for a copy of ``weight``; then it is taken."""
        size = weight.size * mx.float32.size
        if size > self.left:
            return False
        self.left -= size
        return True


class QuickProduct:
    """``x @ weight.T`` of one token.

    Attributes:
        copy: ``[inputs, outputs]``, single precision.
        dtype: Of ``x``, of the matrix and of what comes out.
    """

    __slots__ = ("copy", "dtype")

    def __init__(self, weight: mx.array) -> None:
        """Of ``weight`` ``[outputs, inputs]``, halves."""
        self.copy = mx.contiguous(weight.T.astype(mx.float32))
        self.dtype = weight.dtype
        mx.eval(self.copy)

    def takes(self, x: mx.array) -> bool:
        """Whether ``x`` is one token of the matrix's own dtype."""
        return x.dtype == self.dtype and x.size == x.shape[-1] == self.copy.shape[0]

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` ``[1, 1, inputs]`` to ``[1, 1, outputs]``; lazy."""
        return (x.astype(mx.float32) @ self.copy).astype(self.dtype)


class QuickLinear:
    """A linear layer without bias that takes a single token through single precision."""

    __slots__ = ("_own", "_product")

    def __init__(self, own: Linear) -> None:
        """Stand in for ``own``."""
        self._own = own
        self._product = QuickProduct(own.weight)

    @property
    def weight(self) -> mx.array:
        """``[outputs, inputs]``, as loaded."""
        weight: mx.array = self._own.weight
        return weight

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` ``[batch, tokens, inputs]`` to ``[batch, tokens, outputs]``."""
        product = self._product
        if product.takes(x):
            return product(x)
        own: mx.array = self._own(x)
        return own


class QuickEmbedding:
    """An embedding whose use as the output layer takes a single token through single precision.

    Its copy is made when it is first used so: an embedding that is not tied never is.
    """

    __slots__ = ("_budget", "_own", "_product")

    def __init__(self, own: Embedding, budget: Budget) -> None:
        """Stand in for ``own``."""
        self._own = own
        self._budget = budget
        self._product: QuickProduct | None = None

    @property
    def weight(self) -> mx.array:
        """``[vocab_size, dim]``, as loaded."""
        weight: mx.array = self._own.weight
        return weight

    def __call__(self, x: mx.array) -> mx.array:
        """Token ids ``[batch, tokens]`` to rows ``[batch, tokens, dim]``."""
        rows: mx.array = self._own(x)
        return rows

    def as_linear(self, x: mx.array) -> mx.array:
        """``x`` ``[batch, tokens, dim]`` to ``[batch, tokens, vocab_size]``."""
        if self._product is None and x.size == x.shape[-1] and self._budget.take(self.weight):
            self._product = QuickProduct(self.weight)
        product = self._product
        if product is not None and product.takes(x):
            return product(x)
        # Bound first: strict mypy refuses a direct call of an untyped function.
        as_linear: Any = self._own.as_linear
        own: mx.array = as_linear(x)
        return own


def quicken(network: Module, budget: Budget | None = None) -> int:
    """Let large matrices of ``network`` take single tokens through single precision, in place.

    For backends whose products of halves are slow: MLX's CPU. The results keep every bit; where the
    trial says that they would not, or there is no room, nothing changes.

    Args:
        network: As loaded and cast.
        budget: What copies may take; None for :data:`COPY_BYTES_MAX`.

    Returns:
        Linear layers that were replaced.
    """
    budget = budget or Budget()
    # Bound first: strict mypy refuses a direct call of an untyped function.
    named_modules: Any = network.named_modules
    found: list[tuple[Any, str, Any]] = [
        (parent, name, child)
        for _, parent in named_modules()
        for name, child in list(parent.items())
        if type(child) in (Linear, Embedding) and _gains(child)
    ]
    linear = [(parent, name, child) for parent, name, child in found if type(child) is Linear]
    room = sum(child.weight.size for _, _, child in linear) * mx.float32.size <= budget.left
    replaced = 0
    for parent, name, child in found:
        if not same_sums(child.weight.dtype):
            continue
        if type(child) is Embedding:
            setattr(parent, name, QuickEmbedding(child, budget))
        elif room and budget.take(child.weight):
            setattr(parent, name, QuickLinear(child))
            replaced += 1
    return replaced


def _gains(child: Any) -> bool:  # noqa: ANN401 - MLX's, duck-typed
    weight = child.weight
    return weight.dtype in _HALVES and weight.size >= _ELEMENTS_MIN and "bias" not in child


@functools.cache
def same_sums(dtype: mx.Dtype) -> bool:
    """Whether both ways give the same bits for ``dtype`` here. Tried once a process."""
    return all(_same_sums(dtype, outputs, half) for outputs, half in _TRIED)


def _same_sums(dtype: mx.Dtype, outputs: int, half: int) -> bool:
    weight, x = cancelling(dtype, outputs, half)
    own, quick = x @ weight.T, QuickProduct(weight)(x)
    same: Any = mx.array_equal(own.view(mx.uint16), quick.view(mx.uint16))
    return bool(same.item())


def cancelling(dtype: mx.Dtype, outputs: int, half: int) -> tuple[mx.array, mx.array]:
    """A matrix ``[outputs, 2 * half]`` and a token ``[1, 1, 2 * half]`` whose product is zero.

    Each product stands there twice, with both signs: rounding is all that is left of a sum.
    """
    # Numbers without a pattern, some far larger than others.
    where = mx.arange(outputs * half, dtype=mx.float32)
    left = (mx.sin(where * 1.7) * mx.exp(3.0 * mx.sin(where * 0.37))).astype(dtype)
    left = left.reshape(outputs, half)
    x = mx.cos(mx.arange(half, dtype=mx.float32) * 2.3).astype(dtype)
    weight = mx.concatenate([left, -left[:, ::-1]], axis=1)
    return weight, mx.concatenate([x, x[::-1]])[None, None]
