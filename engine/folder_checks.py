"""A model folder's config and weights against each other, before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine import config_checks, config_rope, weight_checks
from engine.architectures import Architecture
from engine.config_checks import Fields
from engine.identity import quantisation_text, read_json_object
from engine.weight_headers import read_headers


def require_config(fields: Fields, architecture: Architecture) -> None:
    """Refuse a config that asks for math that nobody here does, or contradicts itself.

    Raises:
        ModelFolderError: Names the field.
    """
    config_checks.require_layer_types(fields, architecture)
    config_checks.require_pattern(fields)
    config_checks.require_settings(fields, architecture)
    config_rope.require_rules(fields)


def require_weights(
    folder: Path, weight_files: Sequence[Path], fields: Fields, *, chosen: bool
) -> None:
    """Refuse weights that are not whole, or not of the shapes and types that the config says.

    Args:
        folder: The model.
        weight_files: Its weights.
        fields: Its text fields.
        chosen: The caller asked for a dtype, so the config's word does not matter.

    Raises:
        ModelFolderError: Names the file, the tensor or the field.
    """
    index = folder / weight_checks.INDEX_FILE
    if index.is_file():
        weight_checks.require_all_shards(folder, weight_files, read_json_object(index))
    headers = read_headers(weight_files)
    packed = quantisation_text(fields) != "none" or (folder / "hf_quant_config.json").is_file()
    weight_checks.require_layers(fields, headers)
    weight_checks.require_shapes(fields, headers)
    weight_checks.require_dtypes(fields, headers, packed=packed, chosen=chosen)
