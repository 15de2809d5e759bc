"""Building the common parts of a layer from named weights."""

from __future__ import annotations

import numpy as np

from engine.oracle.attention import Projections
from engine.oracle.decoder import Embedding, Head
from engine.oracle.geometry import Geometry
from engine.oracle.mlp import GatedMlp, Gating, silu_gating
from engine.oracle.operators import Linear, RmsNorm, Transform, centred
from engine.oracle.weights import Weights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head"


def projections(weights: Weights, prefix: str, size: Geometry, bias: bool = False) -> Projections:
    """``q_proj, k_proj, v_proj, o_proj`` under ``prefix``."""
    return Projections(
        weights.linear(f"{prefix}.q_proj", size.hidden, size.query_width, bias),
        weights.linear(f"{prefix}.k_proj", size.hidden, size.key_width, bias),
        weights.linear(f"{prefix}.v_proj", size.hidden, size.key_width, bias),
        weights.linear(f"{prefix}.o_proj", size.query_width, size.hidden, bias),
    )


def gated_mlp(
    weights: Weights,
    prefix: str,
    hidden: int,
    inner: int,
    gating: Gating = silu_gating,
    bias: bool = False,
) -> GatedMlp:
    """``gate_proj, up_proj, down_proj`` under ``prefix``."""
    return GatedMlp(
        weights.linear(f"{prefix}.gate_proj", hidden, inner, bias),
        weights.linear(f"{prefix}.up_proj", hidden, inner, bias),
        weights.linear(f"{prefix}.down_proj", inner, hidden, bias),
        gating,
    )


def stacked_experts(
    weights: Weights,
    prefix: str,
    count: int,
    hidden: int,
    inner: int,
    gating: Gating = silu_gating,
    bias: bool = False,
) -> tuple[GatedMlp, ...]:
    """``count`` MLPs from weights ``[count, outputs, inputs]`` (and biases) under ``prefix``."""
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    stacks = {
        name: weights.take(f"{prefix}.{name}.weight", count, *shape).astype(np.float64)
        for name, shape in shapes.items()
    }
    biases = {
        name: weights.take(f"{prefix}.{name}.bias", count, shape[0]).astype(np.float64)
        for name, shape in shapes.items()
        if bias
    }

    def projection(name: str, index: int) -> Linear:
        return Linear(stacks[name][index], biases[name][index] if bias else None)

    return tuple(
        GatedMlp(
            projection("gate_proj", index),
            projection("up_proj", index),
            projection("down_proj", index),
            gating,
        )
        for index in range(count)
    )


def rms_norm(weights: Weights, name: str, width: int, eps: float) -> RmsNorm:
    """The norm whose scale is the tensor ``name`` + ``.weight``."""
    return RmsNorm(weights.vector(f"{name}.weight", width), eps)


def centred_norm(weights: Weights, name: str, width: int, eps: float) -> RmsNorm:
    """The norm whose scale is one plus the tensor ``name`` + ``.weight``."""
    return centred(weights.vector(f"{name}.weight", width), eps)


def embedding(
    weights: Weights, size: Geometry, scale: float = 1.0, norm: Transform | None = None
) -> Embedding:
    """The token embedding."""
    return Embedding(weights.take(EMBEDDING, size.vocab, size.hidden), scale, norm)


def head(
    weights: Weights,
    size: Geometry,
    norm: Transform,
    tied: bool,
    scale: float = 1.0,
    cap: float | None = None,
) -> Head:
    """The output head: ``lm_head``, or the embedding's table where the two are tied."""
    if tied:
        weights.drop(f"{HEAD}.weight")
        table = weights.take(EMBEDDING, size.vocab, size.hidden)
        return Head(norm, Linear(table.astype(np.float64)), scale, cap)
    return Head(norm, weights.linear(HEAD, size.hidden, size.vocab), scale, cap)
