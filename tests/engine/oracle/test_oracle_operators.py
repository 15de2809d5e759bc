"""Elementary operations where tiny models do not reach: small variances, clamps, huge sinks."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu_oai

from engine.oracle.attention import attend
from engine.oracle.mlp import clamped_gating, largest, silu_gating
from engine.oracle.operators import (
    LayerNorm,
    Linear,
    RmsNorm,
    gelu_tanh,
    rounded,
    sigmoid,
    softcapped,
)
from engine.oracle.plane import HistoryPlane

WIDE = np.linspace(-40, 40, 801)


@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1.0, 1e3])
def test_norms_agree_with_mlx_down_to_where_eps_decides(spread: float) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(0, spread, (5, 64)).astype(np.float32)
    weight, bias = rng.normal(size=(2, 64)).astype(np.float32)
    eps = 1e-5
    rms = RmsNorm(weight.astype(np.float64), eps)(x)
    assert np.abs(rms - np.array(mx.fast.rms_norm(mx.array(x), mx.array(weight), eps))).max() < 2e-6
    layer = LayerNorm(weight.astype(np.float64), bias.astype(np.float64), eps)(x)
    expected = mx.fast.layer_norm(mx.array(x), mx.array(weight), mx.array(bias), eps)
    assert np.abs(layer - np.array(expected)).max() < 2e-6


def test_activations_agree_with_mlx_over_a_wide_range() -> None:
    x = mx.array(WIDE.astype(np.float32))
    exact = np.array(x).astype(np.float64)
    for ours, theirs in [
        (gelu_tanh(exact), nn.gelu_approx(x)),
        (silu_gating(exact, np.ones_like(exact)), nn.silu(x)),
        (sigmoid(exact), mx.sigmoid(x)),
    ]:
        assert np.abs(ours - np.array(theirs)).max() < 5e-6
    # 0.044715 x^3 is where a wrong constant shows: at 2 by 2e-6 for each unit of its last place.
    assert gelu_tanh(np.array([2.0]))[0] == pytest.approx(1.9545976940877752, abs=1e-12)


def test_clamped_gating_agrees_beyond_its_limits() -> None:
    gate, up = np.meshgrid(np.linspace(-20, 20, 81), np.linspace(-20, 20, 81))
    gate, up = gate.astype(np.float32), up.astype(np.float32)
    expected = np.array(swiglu_oai(mx.array(gate), mx.array(up)))
    found = clamped_gating(gate.astype(np.float64), up.astype(np.float64))
    assert np.abs(found - expected).max() < 1e-5


def test_extreme_inputs_overflow_nowhere() -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert sigmoid(np.array([-1e30, 1e30])).tolist() == [0.0, 1.0]
        rows = np.ones((1, 1, 2), np.float32)
        plane = HistoryPlane(rows, rows)
        assert not attend(rows, plane, 0, None, 1.0, np.array([1e4])).any()
        assert attend(1e30 * rows, plane, 0, None, 1.0, np.array([1e4])).all()
        assert softcapped(np.array([1e30, -1e30], np.float32), 20.0).tolist() == [20.0, -20.0]


def test_sums_are_carried_in_float64_and_rounded_once() -> None:
    """1e8 + 1 - 1e8 is 0 when float32 carries the sum."""
    weight = np.array([[1.0, 1.0, 1.0]])
    x = np.array([[1e8, 1.0, -1e8]], np.float32)
    assert Linear(weight)(x).tolist() == [[1.0]]
    assert rounded(np.array([1 + 2.0**-25])).tolist() == [1.0]


def test_equal_scores_choose_the_lower_expert() -> None:
    assert largest(np.array([[0.5, 0.9, 0.5, 0.5]]), 2).tolist() == [[1, 0]]
