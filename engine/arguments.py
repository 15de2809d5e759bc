"""What mlx-lm builds a network from, read from a config without mlx-lm, and the rows that follow.

Identity is over these arguments and over the layout, so whoever computes a folder's rows without
MLX needs both, value for value. They are written down here for the architectures that such a
producer computes; tests compare them with what mlx-lm and the loaded network say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.architectures import FULL, SLIDING
from engine.canonical import f64_bits
from engine.config_checks import Fields, refuse
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout

Arguments = dict[str, Any]

_MUSE_GLIMMER: Final[Mapping[str, Any]] = {
    "model_type": "muse_glimmer",
    "hidden_size": 6656,
    "num_hidden_layers": 52,
    "intermediate_size": 19968,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 202048,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "sliding_window": 2048,
    "qk_scale_factor": 3.87,
    "hidden_activation": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_parameters": None,
    "layer_types": None,
    "layer_rope_theta": None,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.19611613513818404,
}

_COHERE2: Final[Mapping[str, Any]] = {
    "model_type": None,
    "hidden_size": 4096,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 50000.0,
    "vocab_size": 256000,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "attention_bias": False,
    "layer_norm_bias": False,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


@dataclass(frozen=True, slots=True)
class _Known:
    """One architecture.

    Attributes:
        defaults: Every argument, with mlx-lm's default.
        settled: What mlx-lm fills in after it has read the config.
        kinds: The kind of every layer.
        turned: Which layers rotate their keys.
        interleaved: Rotated pairs are neighbours.
    """

    defaults: Mapping[str, Any]
    settled: Callable[[Arguments], Arguments]
    kinds: Callable[[Arguments], list[str]]
    turned: Callable[[Arguments, list[str]], list[bool]]
    interleaved: bool


def _settle_muse_glimmer(given: Arguments) -> Arguments:
    found, inner = dict(given), given["rope_parameters"]
    if inner and "rope_theta" in inner:
        found["rope_theta"] = inner["rope_theta"]
    if found["layer_types"] is None:
        count = found["num_hidden_layers"]
        found["layer_types"] = [FULL if index % 4 == 3 else SLIDING for index in range(count)]
    if found["layer_rope_theta"] is None:
        theta = found["rope_theta"]
        found["layer_rope_theta"] = [0 if kind == FULL else theta for kind in found["layer_types"]]
    return found


def _cohere2_kinds(arguments: Arguments) -> list[str]:
    period = arguments["sliding_window_pattern"]
    count = arguments["num_hidden_layers"]
    return [FULL if index % period == period - 1 else SLIDING for index in range(count)]


_KNOWN: Final[Mapping[str, _Known]] = {
    "muse_glimmer": _Known(
        _MUSE_GLIMMER,
        _settle_muse_glimmer,
        lambda arguments: list(arguments["layer_types"]),
        lambda arguments, _: [bool(theta) for theta in arguments["layer_rope_theta"]],
        interleaved=False,
    ),
    "cohere2": _Known(
        _COHERE2,
        dict,
        _cohere2_kinds,
        lambda _, kinds: [kind == SLIDING for kind in kinds],
        interleaved=True,
    ),
}

#: Architectures whose arguments are written down here.
WRITTEN_DOWN: Final = tuple(sorted(_KNOWN))


def arguments_from(config: Fields) -> Arguments:
    """What mlx-lm's argument class holds after it has read ``config``.

    Args:
        config: ``config.json``, with the changes that the loader makes to it.

    Raises:
        ModelFolderError: Its ``model_type`` is not written down here.
    """
    known = _known(config)
    inner = config.get("text_config")
    fields = {**config, **inner} if isinstance(inner, Mapping) else config
    given = {name: fields.get(name, default) for name, default in known.defaults.items()}
    return known.settled(given)


def layout_from(
    config: Fields, arguments: Arguments, encoding: Encoding, max_context_tokens: int
) -> CacheLayout:
    """The layout that a network of these arguments has.

    Raises:
        ModelFolderError: The ``model_type`` is not written down here.
        KvpackError: No such layout can exist.
    """
    known = _known(config)
    kinds = known.kinds(arguments)
    turned = known.turned(arguments, kinds)
    heads, dim = int(arguments["num_key_value_heads"]), int(arguments["head_dim"])
    rope = RopeLayout(f64_bits(float(arguments["rope_theta"])), dim, known.interleaved)
    layers = [
        LayerLayout(
            LayerKind.SWA if kind == SLIDING else LayerKind.FULL,
            int(arguments["sliding_window"]) if kind == SLIDING else None,
            heads,
            dim,
            dim,
            rope if turns else None,
        )
        for kind, turns in zip(kinds, turned, strict=True)
    ]
    return CacheLayout(tuple(layers), encoding, max_context_tokens)


def _known(config: Fields) -> _Known:
    model_type = config.get("model_type")
    if model_type not in _KNOWN:
        refuse("model_type", " or ".join(WRITTEN_DOWN), repr(model_type))
    return _KNOWN[str(model_type)]
