"""A folder's config, read once, and compared with the network that mlx-lm built from it.

mlx-lm takes the fields that it knows and leaves the rest; a list that is too short ends the model
early, a pattern wins over a list that contradicts it, a setting that it does not read changes
nothing. Each of these loads without a word and computes another model. Here a config that
contradicts the network, or itself, is refused by field, expected and found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from engine.architectures import FULL, SLIDING, Architecture
from engine.errors import ModelFolderError

Fields = Mapping[str, Any]

_CONTEXT_KEYS: Final = ("max_position_embeddings", "model_max_length")
_KINDS: Final = (SLIDING, FULL)


def refuse(field: str, expected: object, found: object) -> NoReturn:
    """Refuse the config for one field.

    Raises:
        ModelFolderError: Always.
    """
    raise ModelFolderError(f"config.json: {field}: expected {expected}, found {found}")


def text_fields(config: Fields) -> dict[str, Any]:
    """The language model's fields: a ``text_config`` wins over what surrounds it."""
    inner = config.get("text_config")
    if inner is None:
        return dict(config)
    if not isinstance(inner, Mapping):
        refuse("text_config", "an object", type(inner).__name__)
    return {**config, **inner, "model_type": config.get("model_type")}


def integer(fields: Fields, name: str) -> int | None:
    """A positive integer, or None where the field is absent or null.

    Raises:
        ModelFolderError: It is something else.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(name, "a positive integer", value)
    return value


def number(value: object, name: str) -> float:
    """``value`` as a number.

    Raises:
        ModelFolderError: It is something else.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(name, "a number", value)
    return float(value)


def max_context_tokens(fields: Fields, architecture: Architecture) -> int:
    """Tokens that the context holds.

    Raises:
        ModelFolderError: The config does not say, and the architecture has no published default.
    """
    for name in _CONTEXT_KEYS:
        value = integer(fields, name)
        if value is not None:
            return value
    if architecture.default_context_tokens is None:
        refuse(_CONTEXT_KEYS[0], "a positive integer", "nothing")
    return architecture.default_context_tokens


def require_settings(fields: Fields, architecture: Architecture) -> None:
    """Refuse settings that mlx-lm would pass over although they change the math.

    Raises:
        ModelFolderError: Names the setting.
    """
    for name, harmless in architecture.harmless.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            expected = " or ".join(["none", *(str(one) for one in harmless)])
            refuse(name, f"{expected} (mlx-lm computes nothing else)", value)


def require_layer_types(fields: Fields, architecture: Architecture) -> None:
    """Check before loading that ``layer_types`` names one known kind per layer.

    Raises:
        ModelFolderError: Another number of names, an unknown one, or a kind is missing that
            mlx-lm's code needs.
    """
    names = fields.get("layer_types")
    if names is None:
        return
    if not isinstance(names, list):
        refuse("layer_types", "a list", type(names).__name__)
    count = integer(fields, "num_hidden_layers")
    if count is not None and len(names) != count:
        refuse("layer_types", f"{count} entries, as num_hidden_layers says", len(names))
    for index, name in enumerate(names):
        if name not in _KINDS:
            refuse(f"layer_types[{index}]", " or ".join(_KINDS), name)
    for needed in architecture.needs:
        if needed not in names:
            refuse("layer_types", f"at least one {needed}", "none")


def require_pattern(fields: Fields) -> None:
    """Check before loading that a whole pattern fits: mlx-lm looks at its last layer for a mask.

    Raises:
        ModelFolderError: There are fewer layers than ``sliding_window_pattern``.
    """
    pattern, count = fields.get("sliding_window_pattern"), integer(fields, "num_hidden_layers")
    period = len(pattern) if isinstance(pattern, str) else pattern
    if isinstance(period, int) and count is not None and period > count:
        refuse("num_hidden_layers", f"at least {period}, one sliding_window_pattern", count)


def require_windows(fields: Fields, windows: Sequence[int | None]) -> None:
    """Check the network's windows, None for full layers, against the config, layer by layer.

    Raises:
        ModelFolderError: Names the first layer whose kind or window is another.
    """
    count = integer(fields, "num_hidden_layers")
    if count is not None and count != len(windows):
        refuse("num_hidden_layers", f"{len(windows)}, as the network has", count)
    names, stated = fields.get("layer_types"), integer(fields, "sliding_window")
    for index, window in enumerate(windows):
        computed = FULL if window is None else SLIDING
        if names is not None and names[index] != computed:
            refuse(f"layer_types[{index}]", f"{computed}, as mlx-lm computes it", names[index])
        if window is not None and stated is not None and stated != window:
            refuse("sliding_window", f"{window}, as layer {index} has", stated)
