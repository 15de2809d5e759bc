"""Feed-forward parts: the gated MLP, experts, and the two routers that choose among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.oracle.operators import Doubles, Floats, Linear, plus, rounded, sigmoid, silu

#: ``(gate, up) -> inner``, element by element.
Gating = Callable[[Doubles, Doubles], Doubles]


def silu_gating(gate: Doubles, up: Doubles) -> Doubles:
    """``silu(gate) · up``."""
    return silu(gate) * up


def clamped_gating(gate: Doubles, up: Doubles) -> Doubles:
    """GPT-OSS: ``(up' + 1) · g · sigmoid(1.702 g)``, ``g = min(gate, 7)``, ``up'`` within ±7."""
    low = np.minimum(gate, 7.0)
    result: Doubles = (np.clip(up, -7.0, 7.0) + 1.0) * low * sigmoid(1.702 * low)
    return result


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GatedMlp:
    """``y = gating(x W_g, x W_u) W_d``.

    Attributes:
        gate, up: ``hidden`` to ``intermediate``.
        down: Back to ``hidden``.
        gating: How gate and up are combined.
    """

    gate: Linear
    up: Linear
    down: Linear
    gating: Gating = silu_gating

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        gate, up = self.gate(x).astype(np.float64), self.up(x).astype(np.float64)
        return self.down(rounded(self.gating(gate, up)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Routing:
    """Which experts each token goes to, and with what share.

    Attributes:
        chosen: ``[tokens, k]`` expert indices.
        shares: ``[tokens, k]`` factors on the experts' results.
    """

    chosen: npt.NDArray[np.intp]
    shares: Doubles


Router = Callable[[Floats], Routing]


def largest(scores: Doubles, count: int) -> npt.NDArray[np.intp]:
    """Indices of the ``count`` largest scores per row; the lowest index among equals."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :count]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SigmoidRouter:
    """``s = sigmoid(x W)``; the k largest of ``s + bias`` are chosen, with shares from ``s`` alone.

    Attributes:
        projection: ``hidden`` to ``experts``.
        selection_bias: ``[experts]``; it moves the choice, never the share.
        count: Experts per token.
        normalised: Divide the shares by their sum.
        scale: Factor on the shares.
    """

    projection: Linear
    selection_bias: Doubles
    count: int
    normalised: bool
    scale: float

    def __call__(self, x: Floats) -> Routing:
        """The routing of every token."""
        scores = sigmoid(self.projection(x).astype(np.float64))
        chosen = largest(scores + self.selection_bias, self.count)
        shares = np.take_along_axis(scores, chosen, axis=-1)
        if self.normalised:
            shares = shares / np.sum(shares, axis=-1, keepdims=True)
        return Routing(chosen, shares * self.scale)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SoftmaxRouter:
    """The k largest of ``x W + b`` are chosen; their shares are the softmax of those k alone.

    Attributes:
        projection: ``hidden`` to ``experts``, with bias.
        count: Experts per token.
    """

    projection: Linear
    count: int

    def __call__(self, x: Floats) -> Routing:
        """The routing of every token."""
        scores = self.projection(x).astype(np.float64)
        chosen = largest(scores, self.count)
        picked = np.take_along_axis(scores, chosen, axis=-1)
        powers = np.exp(picked - np.max(picked, axis=-1, keepdims=True))
        return Routing(chosen, powers / np.sum(powers, axis=-1, keepdims=True))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExpertMlp:
    """``y = sum over chosen e of share_e · MLP_e(x)``, plus a shared MLP where there is one.

    Attributes:
        experts: All experts, by index.
        router: Chooses among them.
        shared: An MLP that every token passes, or None.
    """

    experts: tuple[GatedMlp, ...]
    router: Router
    shared: GatedMlp | None = None

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, hidden]`` to ``[tokens, hidden]``; expert results are summed in float64."""
        routing = self.router(x)
        total = np.zeros(x.shape, np.float64)
        for index in np.unique(routing.chosen):
            tokens, places = np.nonzero(routing.chosen == index)
            results = self.experts[index](x[tokens]).astype(np.float64)
            total[tokens] += results * routing.shares[tokens, places, None]
        routed = rounded(total)
        return routed if self.shared is None else plus(routed, self.shared(x))
