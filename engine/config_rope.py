"""What a config says about RoPE, in its older and its newer form, against what mlx-lm computes.

Older configs have ``rope_theta`` and ``rope_scaling`` (Gemma 3: ``rope_local_base_freq`` for the
sliding layers). Newer ones keep both in ``rope_parameters``, one object for all layers or one per
layer kind, where mlx-lm mostly does not look: a base frequency there would silently become the
default. So the newer form is translated before loading, and what mlx-lm made of it is compared
with it afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from engine.architectures import FULL, ROPE_RULES, SLIDING
from engine.config_checks import Fields, number, refuse
from kvpack.layout import CacheLayout, LayerKind, RopeLayout

_NAMES: Final = {LayerKind.SWA: SLIDING, LayerKind.FULL: FULL}


def older_form(config: Fields) -> dict[str, Any]:
    """Changes to ``config`` that say in the older fields what it says in ``rope_parameters``.

    Fields that are there already stay. What does not fit the older ones is found afterwards by
    :func:`require_rope`.

    Raises:
        ModelFolderError: ``rope_parameters`` is not an object.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        changes = _older_fields(inner)
        return {"text_config": {**inner, **changes}} if changes else {}
    return _older_fields(config)


def _older_fields(fields: Fields) -> dict[str, Any]:
    full, local = (_parameters(fields, kind) for kind in (LayerKind.FULL, LayerKind.SWA))
    if full is None:
        return {}
    # The rule is stated even where it is none: some of mlx-lm's argument classes have no default.
    found: dict[str, Any] = {"rope_scaling": None if _rule(full) == "default" else dict(full)}
    if "rope_theta" in full:
        found["rope_theta"] = full["rope_theta"]
    if local is not None and local is not full and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    return {name: value for name, value in found.items() if fields.get(name) is None}


def _parameters(fields: Fields, kind: LayerKind) -> Mapping[str, Any] | None:
    """``rope_parameters`` for layers of ``kind``."""
    found = fields.get("rope_parameters")
    if isinstance(found, Mapping) and set(found) & set(_NAMES.values()):
        found = found.get(_NAMES[kind])
    if found is not None and not isinstance(found, Mapping):
        refuse("rope_parameters", "an object", type(found).__name__)
    return found


def _rule(parameters: Fields) -> object:
    return parameters.get("rope_type", parameters.get("type", "default"))


def require_rules(fields: Fields) -> None:
    """Refuse bases that are no numbers, and rules whose angles depend on more than the position.

    Raises:
        ModelFolderError: Names the field.
    """
    for field in ("rope_theta", "rope_local_base_freq"):
        if fields.get(field) is not None:
            number(fields[field], field)
    stated = {
        "rope_scaling": fields.get("rope_scaling"),
        "rope_parameters": _parameters(fields, LayerKind.FULL),
        f"rope_parameters.{SLIDING}": _parameters(fields, LayerKind.SWA),
    }
    for field, rule in stated.items():
        if isinstance(rule, Mapping) and _rule(rule) not in ROPE_RULES:
            refuse(f"{field}.rope_type", " or ".join(ROPE_RULES), _rule(rule))


def require_rope(fields: Fields, layout: CacheLayout) -> None:
    """Check the rotation of every layer against whatever the config says about it.

    Raises:
        ModelFolderError: Names the field that mlx-lm read otherwise, or not at all.
    """
    thetas = fields.get("layer_rope_theta")
    if isinstance(thetas, list) and len(thetas) != len(layout.layers):
        refuse("layer_rope_theta", f"{len(layout.layers)} entries", len(thetas))
    for index, layer in enumerate(layout.layers):
        if layer.rope is None:
            continue
        if isinstance(thetas, list):
            _require_theta(f"layer_rope_theta[{index}]", layer.rope, thetas[index])
        _require_share(fields, index, layer.rope, layer.key_dim)
        parameters = _parameters(fields, layer.kind)
        if parameters is not None:
            _require_parameters(f"rope_parameters of layer {index}", layer.rope, parameters)


def _require_share(fields: Fields, index: int, rope: RopeLayout, key_dim: int) -> None:
    share = fields.get("partial_rotary_factor")
    if share is not None and int(key_dim * number(share, "partial_rotary_factor")) != rope.dims:
        refuse("partial_rotary_factor", f"{rope.dims / key_dim}, as layer {index} has", share)


def _require_parameters(field: str, rope: RopeLayout, parameters: Fields) -> None:
    _require_theta(f"{field}.rope_theta", rope, parameters.get("rope_theta"))
    if (_rule(parameters) == "default") != (rope.scaling == "none"):
        refuse(f"{field}.rope_type", f"what mlx-lm computes ({rope.scaling})", _rule(parameters))


def _require_theta(field: str, rope: RopeLayout, stated: object) -> None:
    computed = struct.unpack("<d", rope.theta_bits.to_bytes(8, "little"))[0]
    if stated is not None and number(stated, field) != computed:
        refuse(field, f"{computed}, as mlx-lm computes it", stated)
