"""Angles: in float64 at any position, in both pairings, under every scaling rule."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from engine.oracle import Dialect, OracleModelError
from engine.oracle.rope import build_rope

DIMS, THETA = 64, 500_000.0

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
RULES = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}


def unit_heads(interleaved: bool) -> np.ndarray:
    """``[1, 1, DIMS]`` whose pairs are all ``(1, 0)``: the turned pair is then (cos, sin)."""
    x = np.zeros((1, 1, DIMS), np.float32)
    if interleaved:
        x[..., 0::2] = 1
    else:
        x[..., : DIMS // 2] = 1
    return x


def pairs_of(turned: np.ndarray, interleaved: bool) -> tuple[np.ndarray, np.ndarray]:
    flat = turned[0, 0]
    if interleaved:
        return flat[0::2], flat[1::2]
    return flat[: DIMS // 2], flat[DIMS // 2 :]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position", [0, 1, 70_000, 131_071])
def test_angles_equal_float64_at_any_position(position: int, interleaved: bool) -> None:
    """Half a unit in the last place of float32, at position 70,000 as at 1."""
    turned = build_rope(THETA, DIMS, interleaved)(unit_heads(interleaved), position)
    cosines, sines = pairs_of(turned, interleaved)
    for index in range(DIMS // 2):
        angle = position * math.exp(-2 * index / DIMS * math.log(THETA))
        # exp and log in float64 are good to 1e-15 relative, so the angle is to 1e-10.
        assert abs(float(cosines[index]) - math.cos(angle)) < 3.1e-8
        assert abs(float(sines[index]) - math.sin(angle)) < 3.1e-8


def test_a_pair_turns_forwards() -> None:
    """``(a, b)`` at angle t is ``(a cos t - b sin t, b cos t + a sin t)``."""
    x = np.array([[[3.0, 4.0]]], np.float32)
    turned = build_rope(10_000.0, 2)(x, 1)[0, 0]
    cosine, sine = math.cos(1.0), math.sin(1.0)
    assert np.allclose(turned, [3 * cosine - 4 * sine, 4 * cosine + 3 * sine], atol=1e-6)


def test_positions_count_up_within_a_call() -> None:
    rope = build_rope(THETA, DIMS)
    x = np.repeat(unit_heads(False), 3, axis=0)
    together = rope(x, 41)
    for index in range(3):
        assert np.array_equal(together[index : index + 1], rope(x[:1], 41 + index))


def reference_rotation(rule: dict | None, interleaved: bool, position: int) -> np.ndarray:
    rope = initialize_rope(DIMS, THETA, interleaved, rule, 131_072)
    return np.array(rope(mx.array(unit_heads(interleaved)), offset=position))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_scaling_rule_agrees_with_mlx_lm(rule: dict | None, interleaved: bool) -> None:
    rope = build_rope(THETA, DIMS, interleaved, rule)
    for position in (1, 100, 1000):
        found = rope(unit_heads(interleaved), position)
        # float32 angles: a relative 2e-7 of up to 1,000 radians.
        difference = np.abs(found - reference_rotation(rule, interleaved, position)).max()
        assert difference < 1e-6 + 3e-7 * position


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_drift_of_float32_angles_at_position_70_000_is_bounded(rule: dict | None) -> None:
    """Engines that form angles in float32 differ here by up to 1e-2; the oracle does not."""
    found = build_rope(THETA, DIMS, False, rule)(unit_heads(False), 70_000)
    assert np.abs(found - reference_rotation(rule, False, 70_000)).max() < 2e-2


def test_yarn_without_truncation_is_where_the_references_part() -> None:
    """GPT-OSS publishes ``truncate: false``; mlx-lm rounds the ramp anyway, transformers does not.

    The ramp is written out here for the published numbers: 64 elements, base 150,000.
    """
    rule = {**YARN, "truncate": False}
    exact = build_rope(150_000.0, DIMS, scaling=rule, dialect=Dialect.TRANSFORMERS)
    rounded = build_rope(150_000.0, DIMS, scaling=rule, dialect=Dialect.MLX_LM)
    always = build_rope(150_000.0, DIMS, scaling=YARN, dialect=Dialect.TRANSFORMERS)
    assert np.array_equal(rounded.frequencies, always.frequencies)
    low = DIMS * math.log(4096 / (32 * 2 * math.pi)) / (2 * math.log(150_000.0))
    high = DIMS * math.log(4096 / (2 * math.pi)) / (2 * math.log(150_000.0))
    assert (round(low, 2), round(high, 2)) == (8.09, 17.4)
    share = (12 - low) / (high - low)
    expected = 150_000.0 ** (-24 / DIMS) * (1 - share + share / 32)
    assert math.isclose(exact.frequencies[12], expected, rel_tol=1e-12)
    assert abs(exact.frequencies[12] / rounded.frequencies[12] - 1) > 0.01


def test_an_explicit_attention_factor_counts_for_transformers_only() -> None:
    rule = {**YARN, "attention_factor": 1.5}
    assert build_rope(THETA, DIMS, scaling=rule, dialect=Dialect.TRANSFORMERS).amplitude == 1.5
    assert build_rope(THETA, DIMS, scaling=rule).amplitude == 0.1 * math.log(32.0) + 1


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({**YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**YARN, "factor": "8"}, "factor"),
    ],
)
def test_unknown_rules_and_missing_fields_are_refused(rule: dict, field: str) -> None:
    with pytest.raises(OracleModelError) as caught:
        build_rope(THETA, DIMS, scaling=rule)
    assert caught.value.field == field


def test_a_base_of_one_is_refused() -> None:
    with pytest.raises(OracleModelError, match="rope_theta"):
        build_rope(1.0, DIMS)
