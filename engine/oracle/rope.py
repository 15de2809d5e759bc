"""Rotary positions: by which angle a pair of elements is turned, and the turning.

Angles are float64. ``position x frequency`` is about 7e4 radians at position 70,000, where
neighbouring float32 values are 0.008 apart, while float64 leaves 1e-11. An engine that forms its
angles in float32 therefore drifts from this one, and the drift grows with the position.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from engine.oracle.config import Dialect, ModelConfig
from engine.oracle.errors import OracleModelError
from engine.oracle.operators import Doubles, Floats, rounded
from kvpack.layout import LayerKind

_LAYER_NAMES = {LayerKind.SWA: "sliding_attention", LayerKind.FULL: "full_attention"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rope:
    """Turns the first ``dims = 2 x len(frequencies)`` elements of every head.

    Attributes:
        theta: Base frequency.
        frequencies: ``[dims / 2]`` radians per position, float64, after scaling.
        interleaved: Pairs are ``(0, 1), (2, 3)``; else ``(i, i + dims/2)``.
        amplitude: Factor on the turned elements; 1 except for YaRN.
        scaling: Canonical text of the scaling rule, for the layout.
    """

    theta: float
    frequencies: Doubles
    interleaved: bool
    amplitude: float = 1.0
    scaling: str = "none"

    @property
    def dims(self) -> int:
        """Leading elements of a head that are turned."""
        return 2 * len(self.frequencies)

    def __call__(self, x: Floats, first_position: int) -> Floats:
        """``x`` ``[tokens, heads, head_dim]`` of positions ``first_position …``, turned.

        The pair ``(a, b)`` becomes ``(a cos t - b sin t, b cos t + a sin t) x amplitude`` with
        ``t = position x frequency``.
        """
        positions = np.arange(first_position, first_position + len(x), dtype=np.float64)
        angles = positions[:, None, None] * self.frequencies
        cosine, sine = np.cos(angles) * self.amplitude, np.sin(angles) * self.amplitude
        first, second = self._pair_slices()
        turned = x.astype(np.float64)
        left, right = turned[..., first].copy(), turned[..., second].copy()
        turned[..., first] = left * cosine - right * sine
        turned[..., second] = right * cosine + left * sine
        return rounded(turned)

    def _pair_slices(self) -> tuple[slice, slice]:
        if self.interleaved:
            return slice(0, self.dims, 2), slice(1, self.dims, 2)
        return slice(0, self.dims // 2), slice(self.dims // 2, self.dims)


def plain_frequencies(theta: float, dims: int) -> Doubles:
    """``theta^(-2i/dims)`` for ``i = 0 … dims/2 - 1``."""
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    result: Doubles = theta**-exponents
    return result


def build_rope(
    theta: float,
    dims: int,
    interleaved: bool = False,
    scaling: Mapping[str, object] | None = None,
    dialect: Dialect = Dialect.MLX_LM,
) -> Rope:
    """The rotation for a base, a head size and a config's scaling rule (none, or an object).

    Raises:
        OracleModelError: The scaling rule is not one of default, linear, llama3 and yarn, or lacks
            a field.
    """
    if theta <= 1:
        raise OracleModelError("rope_theta", "> 1", theta)
    plain = plain_frequencies(theta, dims)
    rule = ModelConfig(scaling or {}, dialect)
    kind = rule.values.get("rope_type", rule.values.get("type", "default"))
    if kind == "default":
        return Rope(theta, plain, interleaved)
    if kind == "linear":
        return Rope(theta, plain / rule.number("factor"), interleaved, scaling=_text(rule, kind))
    if kind == "llama3":
        return Rope(theta, _llama3(plain, rule), interleaved, scaling=_text(rule, kind))
    if kind == "yarn":
        slowed = _yarn(plain, theta, rule)
        return Rope(theta, slowed, interleaved, _yarn_amplitude(rule), _text(rule, kind))
    raise OracleModelError("rope_type", "default, linear, llama3 or yarn", kind)


def _llama3(plain: Doubles, rule: ModelConfig) -> Doubles:
    """Long waves are slowed by ``factor``, short ones kept, those between are mixed linearly."""
    factor = rule.number("factor")
    low = rule.number("low_freq_factor")
    high = rule.number("high_freq_factor")
    if high <= low:
        raise OracleModelError("high_freq_factor", f"> low_freq_factor {low}", high)
    turns = rule.number("original_max_position_embeddings") * plain / (2 * np.pi)
    kept_share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    mixed: Doubles = plain * (kept_share + (1 - kept_share) / factor)
    return mixed


def _yarn(plain: Doubles, theta: float, rule: ModelConfig) -> Doubles:
    """Frequencies that turn often in the original context are kept, seldom ones slowed.

    Between the element indices where a wave turns ``beta_fast`` and ``beta_slow`` times, the two
    are mixed linearly. Rounding these indices outwards is the default; ``truncate: false`` (as
    GPT-OSS publishes it) asks for none, which transformers does and mlx-lm ignores.
    """
    dims, factor = 2 * len(plain), rule.number("factor")
    original = rule.number("original_max_position_embeddings")

    def index_of(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = index_of(rule.number("beta_fast", 32.0))
    high = index_of(rule.number("beta_slow", 1.0))
    if rule.dialect is Dialect.MLX_LM or rule.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    # Equal bounds would divide by zero; both references widen them by a thousandth.
    width = (high - low) or 0.001
    slowed_share = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    mixed: Doubles = plain * ((1 - slowed_share) + slowed_share / factor)
    return mixed


def _yarn_amplitude(rule: ModelConfig) -> float:
    """``0.1 ln(factor) + 1``, or the quotient of two such for ``mscale`` and ``mscale_all_dim``.

    An explicit ``attention_factor`` wins in transformers; mlx-lm does not read it.
    """
    if rule.dialect is Dialect.TRANSFORMERS and rule.has("attention_factor"):
        return rule.number("attention_factor")
    factor = rule.number("factor")
    if rule.has("mscale") and rule.has("mscale_all_dim"):
        over, under = rule.number("mscale"), rule.number("mscale_all_dim")
        return _magnitude(factor, over) / _magnitude(factor, under)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _text(rule: ModelConfig, kind: str) -> str:
    """The rule as the engine's layout states it: two producers of one row must say the same.

    That is the scale of a linear rule as the bits of a double, and for the others the rule's name
    and a digest of its fields.
    """
    if kind == "linear":
        return f"linear {f64_bits(1.0 / rule.number('factor')):016x}"
    fields = json.dumps(dict(rule.values), sort_keys=True, separators=(",", ":"), default=str)
    return f"{kind} {blake3(fields.encode('ascii')).hexdigest()[:32]}"


def f64_bits(value: float) -> int:
    """The bits of ``value`` as an IEEE 754 double."""
    return int.from_bytes(struct.pack(">d", value), "big")


def rope_theta(config: ModelConfig, kind: LayerKind, default: float | None = None) -> float:
    """The base frequency for layers of ``kind``: ``rope_theta``, or the newer ``rope_parameters``.

    Raises:
        OracleModelError: Neither is given, or they contradict each other.
    """
    newer = _rope_parameters(config, kind)
    if newer is None or "rope_theta" not in newer:
        return config.number("rope_theta", default)
    theta = ModelConfig(newer).number("rope_theta")
    if config.has("rope_theta") and config.number("rope_theta") != theta:
        raise OracleModelError("rope_theta", f"rope_parameters.rope_theta {theta}", "another")
    return theta


def rope_scaling(config: ModelConfig, kind: LayerKind) -> Mapping[str, object] | None:
    """The scaling rule for layers of ``kind``: ``rope_scaling``, else ``rope_parameters``."""
    older = config.mapping("rope_scaling")
    return older if older is not None else _rope_parameters(config, kind)


def _rope_parameters(config: ModelConfig, kind: LayerKind) -> Mapping[str, object] | None:
    """``rope_parameters``, which is one object for all layers or one per kind of layer."""
    parameters = config.mapping("rope_parameters")
    if parameters is None or not set(parameters) & set(_LAYER_NAMES.values()):
        return parameters
    return ModelConfig(parameters).mapping(_LAYER_NAMES[kind])
