"""The elementary operations: projection, norms and activations.

**Precision.** Everything that has a name in a formula (a projection, a norm, a stored key, a
residual sum) is float32. Inside one operation, every sum, product, root and exponential is float64
and is rounded once, to the nearest float32, when the operation ends. So an operation's error is
half a unit in the last place of float32, however long its sums are and however a BLAS orders them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


class Transform(Protocol):
    """A function of activations ``[tokens, …]`` that treats every token alone."""

    def __call__(self, x: Floats) -> Floats:
        """The transformed activations."""
        ...


def rounded(values: Doubles) -> Floats:
    """The nearest float32 of each value: the one rounding at the end of an operation."""
    return values.astype(np.float32)


def plus(left: Floats, right: Floats) -> Floats:
    """A residual sum: float32 plus float32, rounded once."""
    return left + right


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Linear:
    """``y = x Wᵀ + b``.

    Attributes:
        weight: ``[outputs, inputs]``; float32 values held as float64, so that no call converts.
        bias: ``[outputs]`` or None.
    """

    weight: Doubles
    bias: Doubles | None = None

    def __call__(self, x: Floats) -> Floats:
        """``[…, inputs]`` to ``[…, outputs]``."""
        return rounded(self.exact(x.astype(np.float64)))

    def exact(self, x: Doubles) -> Doubles:
        """The same without the rounding, for use inside a larger operation."""
        product: Doubles = x @ self.weight.T
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RmsNorm:
    """``y = w · x / sqrt(mean(x²) + eps)`` over the last axis.

    Attributes:
        weight: ``[width]``, or None for a norm without scale. A centred norm is one whose weight
            was stored as ``w - 1``; see :func:`centred`.
        eps: Added under the root.
    """

    weight: Doubles | None
    eps: float

    def __call__(self, x: Floats) -> Floats:
        """Same shape as ``x``."""
        exact = x.astype(np.float64)
        scaled = exact / np.sqrt(np.mean(exact * exact, axis=-1, keepdims=True) + self.eps)
        return rounded(scaled if self.weight is None else scaled * self.weight)


def centred(weight: Doubles, eps: float) -> RmsNorm:
    """The norm whose checkpoint stores its scale as a difference from one."""
    return RmsNorm(1.0 + weight, eps)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LayerNorm:
    """``y = w · (x - mean(x)) / sqrt(var(x) + eps) + b`` over the last axis; var is biased.

    Attributes:
        weight: ``[width]``.
        bias: ``[width]`` or None.
        eps: Added under the root.
    """

    weight: Doubles
    bias: Doubles | None
    eps: float

    def __call__(self, x: Floats) -> Floats:
        """Same shape as ``x``."""
        exact = x.astype(np.float64)
        apart = exact - np.mean(exact, axis=-1, keepdims=True)
        variance = np.mean(apart * apart, axis=-1, keepdims=True)
        scaled = self.weight * apart / np.sqrt(variance + self.eps)
        return rounded(scaled if self.bias is None else scaled + self.bias)


def sigmoid(x: Doubles) -> Doubles:
    """``1 / (1 + e^-x)``, without overflow for large negative ``x``."""
    result: Doubles = np.exp(-np.logaddexp(0.0, -x))
    return result


def silu(x: Doubles) -> Doubles:
    """``x · sigmoid(x)``."""
    return x * sigmoid(x)


def gelu_tanh(x: Doubles) -> Doubles:
    """``x/2 · (1 + tanh(sqrt(2/pi) · (x + 0.044715 x³)))``: the tanh form, not the erf one."""
    inner = np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)
    result: Doubles = 0.5 * x * (1.0 + np.tanh(inner))
    return result


def softcapped(x: Floats, cap: float) -> Floats:
    """``cap · tanh(x / cap)``: logits bent so that none exceeds ``cap``."""
    return rounded(np.tanh(x.astype(np.float64) / cap) * cap)
