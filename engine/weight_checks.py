"""The weights that a folder has against what its config says of them.

mlx-lm compares names and shapes, too, but names a contradiction as a list of parameters. Here it is
one line: field, expected, found. What the config leaves out is not checked: mlx-lm's own default
then has to fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.config_checks import Fields, integer, refuse
from engine.errors import ModelFolderError
from engine.weight_headers import Headers, TensorHeader

INDEX_FILE: Final = "model.safetensors.index.json"

#: Element types of weights that mlx-lm computes with, and of packed ones.
_FLOATS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PACKED: Final = ("U32", "U8")

#: A tensor of a text layer, however the language model is nested.
_LAYER: Final = re.compile(
    r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d{1,6})\.(.+)"
)
_HEAD_FIELDS: Final = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
}
_PROJECTIONS: Final = {f"self_attn.{name}.weight": name for name in _HEAD_FIELDS}
_EMBEDDING: Final = re.compile(
    r"(?:language_model\.)?model\.(?:language_model\.)?embed_tokens\.weight"
)


def require_all_shards(folder: Path, files: Sequence[Path], index: Mapping[str, Any]) -> None:
    """Check that every file that the folder's index names is there.

    Raises:
        ModelFolderError: One is missing, as after a download that was broken off.
    """
    named = index.get("weight_map")
    if not isinstance(named, dict):
        raise ModelFolderError(f"{INDEX_FILE}: weight_map: expected an object")
    present = {path.name for path in files}
    for name in sorted({str(file) for file in named.values()}):
        if name not in present:
            raise ModelFolderError(f"{folder}: {name}, named by {INDEX_FILE}, is missing")


def require_layers(fields: Fields, headers: Headers) -> None:
    """Check the number of layers: both a config that says fewer and one that says more.

    Raises:
        ModelFolderError: The weights have another number, or a layer is missing.
    """
    layers = {int(match[1]) for match in map(_LAYER.fullmatch, headers) if match}
    stated = integer(fields, "num_hidden_layers")
    if not layers or stated is None:
        return
    if max(layers) + 1 != stated:
        refuse("num_hidden_layers", f"{max(layers) + 1}, as the weights have", stated)
    for index in range(stated):
        if index not in layers:
            raise ModelFolderError(f"layers[{index}]: expected weights, found none")


def require_shapes(fields: Fields, headers: Headers) -> None:
    """Check heads, widths and the vocabulary of the config against the weights' own rows.

    Packed weights keep their rows; their columns say nothing here.

    Raises:
        ModelFolderError: Names the config's field.
    """
    projections: dict[str, dict[str, int]] = {}
    for name, header in headers.items():
        match = _LAYER.fullmatch(name)
        if match and match[2] in _PROJECTIONS and header.shape:
            projections.setdefault(match[1], {})[_PROJECTIONS[match[2]]] = header.shape[0]
        elif _EMBEDDING.fullmatch(name):
            _require_embedding(fields, header)
    for layer in sorted(projections, key=int):
        _require_heads(fields, f"in layer {layer}", projections[layer])


def _require_heads(fields: Fields, where: str, rows: Mapping[str, int]) -> None:
    """``rows`` by projection: heads x head_dim, where config fields that are absent say nothing."""
    hidden, head_dim = integer(fields, "hidden_size"), integer(fields, "head_dim")
    counts = {field: integer(fields, field) for field in _HEAD_FIELDS.values()}
    heads = counts["num_attention_heads"]
    if head_dim is None:
        head_dim = hidden // heads if hidden is not None and heads is not None else None
    elif implied := _one_head_dim(counts, rows, head_dim):
        refuse("head_dim", f"{implied}, as the rows of all projections {where}", head_dim)
    for projection, field in _HEAD_FIELDS.items():
        count = counts[field]
        if head_dim is None or count is None or projection not in rows:
            continue
        if rows[projection] != count * head_dim:
            found = f"{rows[projection]} rows of {projection} {where}, each head {head_dim}"
            refuse(field, found, f"{count} heads")


def _one_head_dim(counts: Mapping[str, int | None], rows: Mapping[str, int], stated: int) -> int:
    """The head size that all projections agree on, if it is another than ``stated``; else 0."""
    implied = {
        divmod(rows[projection], counts[field] or 1)
        for projection, field in _HEAD_FIELDS.items()
        if projection in rows
    }
    size, rest = implied.pop() if len(implied) == 1 else (0, 0)
    return 0 if rest or size == stated or None in counts.values() else size


def _require_embedding(fields: Fields, header: TensorHeader) -> None:
    vocab, hidden = integer(fields, "vocab_size"), integer(fields, "hidden_size")
    shape = header.shape
    if len(shape) != 2:
        refuse("embed_tokens", "2 axes", len(shape))
    if vocab is not None and shape[0] != vocab:
        refuse("vocab_size", f"{shape[0]}, as the embedding has", vocab)
    if header.dtype in _FLOATS and hidden is not None and shape[1] != hidden:
        refuse("hidden_size", f"{shape[1]}, as the embedding has", hidden)


def require_dtypes(fields: Fields, headers: Headers, *, packed: bool, chosen: bool) -> None:
    """Check the element types of the text layers, and what the config says of them.

    Args:
        fields: The config.
        headers: The tensors.
        packed: The config states a quantisation.
        chosen: The caller asked for a dtype, so the config's word does not matter.

    Raises:
        ModelFolderError: A tensor is of a type that is not supported, or the config names another
            type than the weights have.
    """
    allowed = (*_FLOATS, *_PACKED) if packed else tuple(_FLOATS)
    stated = fields.get("torch_dtype", fields.get("dtype"))
    for name, header in sorted(headers.items()):
        match = _LAYER.fullmatch(name)
        if not match:
            continue
        if header.dtype not in allowed:
            raise ModelFolderError(
                f"{name}: dtype: expected {' or '.join(allowed)}, found {header.dtype}"
            )
        found = _FLOATS.get(header.dtype)
        compared = match[2] == "self_attn.k_proj.weight" and not packed and not chosen
        if compared and stated in _FLOATS.values() and stated != found:
            hint = "; correct it, or load with dtype=..."
            refuse("torch_dtype", f"{found}, as {name} is{hint}", stated)
