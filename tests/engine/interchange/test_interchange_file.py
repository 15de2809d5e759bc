"""Caches from somewhere: every name and number is checked against the others and the model.

Each case is a change of one whole file that is accepted. Everything that is refused is refused by
an error of ours that names the place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cache_file_kit import (
    DIM,
    HEADS,
    POSITION,
    Change,
    W,
    add,
    blank_file,
    changed,
    drop,
    encoded,
    retype,
    set_metadata,
    set_number,
    set_offset,
    set_rows,
)
from engine_support import ModelCase
from interchange_support import from_pack, to_pack
from mlx_lm_sessions import tokens

import engine
from engine.interchange import MlxLmModel
from engine.interchange_cache import read_layers, require_layout
from engine.interchange_file import parse_tensor_file
from kvpack.errors import EXIT_MALFORMED, EXIT_MISMATCH, LimitError
from kvpack.interchange import CacheFileError, CacheFormatError, CacheMismatchError
from kvpack.layout import Encoding


@pytest.fixture(scope="module")
def model(load: Callable[[ModelCase], engine.Model]) -> MlxLmModel:
    return MlxLmModel(load(ModelCase("muse_glimmer", "float16", window=W)))


def test_the_file_that_every_case_changes_is_read(model: MlxLmModel) -> None:
    data = encoded(blank_file())
    layers = read_layers(parse_tensor_file(data))
    assert [(s.offset, s.window_tokens, s.first, s.head) for s in layers] == [
        *[(POSITION, W, 5, 5)] * 3,
        (POSITION, None, 0, 0),
    ]
    assert to_pack(model, data, tokens(POSITION))


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "offset of one layer": (set_number("2.2", POSITION + 1), r"layers\[2\]\.offset"),
    "offset beyond the rows": (set_offset(5000), r"layers\[3\]\.offset: expected at most 256"),
    "no token": (set_offset(0), r"offset: expected at least one"),
    "negative offset": (set_offset(-1), r"offset"),
    "_idx of a million": (set_number("0.5", 10**6), r"layers\[0\]\._idx: expected 1 to 8"),
    "_idx zero": (set_number("1.5", 0), r"layers\[1\]\._idx"),
    "_idx negative": (set_number("1.5", -3), r"layers\[1\]\._idx"),
    "_idx above the window": (set_number("1.5", W + 1), r"layers\[1\]\._idx"),
    "window of zero": (set_number("0.4", 0), r"layers\[0\]\.max_size"),
    "fewer rows than the window": (set_rows(0, W - 1), r"layers\[0\]\.rows: expected 8 to 21"),
    "more rows than tokens": (set_rows(0, POSITION + 1), r"layers\[0\]\.rows"),
    "wide, but not at its end": (set_rows(0, 15), r"layers\[0\]\._idx: expected 15"),
    "a number of 64 bits": (
        lambda parts: parts["tensors"].update({"0.2": ["I64", [], bytes(8)]}),
        r"layers\[0\]\.offset: expected one I32",
    ),
    "a number with an axis": (retype("0.2", "I32", [1]), r"layers\[0\]\.offset"),
    "batch of two": (retype("0.0", "F16", [2, 1, W, DIM]), r"layers\[0\]\.keys\.shape"),
    "three axes": (retype("0.0", "F16", [HEADS, W, DIM]), r"layers\[0\]\.keys\.shape"),
    "values of other rows": (retype("0.1", "F16", [1, HEADS * 2, W // 2, DIM]), r"\.values"),
    "values of another dtype": (retype("0.1", "BF16", [1, HEADS, W, DIM]), r"\.values"),
    "a tensor missing": (drop("1.1"), r"'1\.1'.*found none"),
    "a tensor too many": (add("1.6"), r"'1\.6'.*found one more"),
    "a tensor without a layer": (add("9.0"), r"'9\.0'"),
    "a strange tensor": (add("weights"), r"'weights'"),
    "a number not listed": (set_metadata("2.3.0", "1.0"), r"metadata '2'"),
    "a number listed twice": (set_metadata("2.3.0", "0.2"), r"metadata '2'"),
    "a text for a number": (set_metadata("2.3.1", "string"), r"metadata '2'"),
    "one more entry": (set_metadata("2.14.0", "0.2"), r"metadata '2'"),
    "a layer unlisted": (set_metadata("1.1", None), r"metadata '1'"),
    "a layer misnamed": (set_metadata("1.x", "KVCache"), r"metadata '1'"),
    "a layer with a leading zero": (set_metadata("1.00", "KVCache"), r"metadata '1'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused(name: str, model: MlxLmModel) -> None:
    change, where = CONTRADICTIONS[name]
    with pytest.raises(CacheFileError, match=where) as caught:
        model.read(changed(change), tokens(POSITION))
    assert caught.value.exit_code == EXIT_MALFORMED


#: Metadata as mlx-lm 0.31.3 writes it: numbers of each layer, what the saver wrote, classes.
OLD = {
    "0.0.0": "0", "0.0.1": "8", "0.0.2": "5", "0.0.3": "5", "0.1": "",
    "1.model": "somewhere", "2.0": "RotatingKVCache", "2.1": "KVCache",
}  # fmt: skip

UNKNOWN: dict[str, tuple[Change, str]] = {
    "mlx-lm 0.31": (lambda parts: parts.update(metadata=OLD), "mlx-lm 0.31 or older"),
    "no metadata": (lambda parts: parts.update(metadata={}), "no prompt cache"),
    "a weight file": (lambda parts: parts.update(metadata={"format": "mlx"}), "no prompt cache"),
    "quantised": (set_metadata("1.3", "QuantizedKVCache"), r"layers\[3\].*'QuantizedKVCache'"),
    "chunked": (set_metadata("1.3", "ChunkedKVCache"), "ChunkedKVCache"),
    "recurrent": (set_metadata("1.0", "ArraysCache"), r"layers\[0\].*ArraysCache"),
    "nested": (set_metadata("1.0", "CacheList"), "CacheList"),
    "batched": (set_metadata("1.0", "BatchRotatingKVCache"), "BatchRotatingKVCache"),
    "a class of Python": (set_metadata("1.0", "__import__"), "__import__"),
    "a kept prefix": (set_number("0.3", 4), r"layers\[0\]\.keep: expected 0.*found 4"),
    "an empty cache": (set_metadata("2.1.1", "none"), "an empty cache"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_file_of_another_format_is_refused_by_name(name: str, model: MlxLmModel) -> None:
    change, found = UNKNOWN[name]
    with pytest.raises(CacheFormatError, match=found) as caught:
        model.read(changed(change), tokens(POSITION))
    assert caught.value.exit_code == EXIT_MALFORMED


def test_a_file_of_another_model_is_refused(model: MlxLmModel) -> None:
    for layers, window, field in [
        ("RRRFRRRFRRRF", W, "layers: expected 4, found 12"),
        ("RRR", W, "layers: expected 4, found 3"),
        ("RRFF", W, r"layers\[2\]\.kind: expected swa, found full"),
        ("RRRR", W, r"layers\[3\]\.kind: expected full, found swa"),
        ("RRRF", 2 * W, r"layers\[0\]\.window_tokens: expected 8, found 16"),
        ("RRRF", 5, r"layers\[0\]\.window_tokens: expected 8, found 5"),
    ]:
        with pytest.raises(CacheMismatchError, match=field) as caught:
            model.read(encoded(blank_file(layers, window)), tokens(POSITION))
        assert caught.value.exit_code == EXIT_MISMATCH


@pytest.mark.parametrize(
    ("dtype", "shape", "field"),
    [
        ("BF16", [1, HEADS, W, DIM], r"layers\[0\]\.dtype: expected F16, found BF16"),
        ("U16", [1, HEADS, W, DIM], r"layers\[0\]\.dtype"),
        ("F32", [1, HEADS, W, DIM // 2], r"layers\[0\]\.key_dim"),
        ("F16", [1, DIM, W, HEADS], r"layers\[0\]\.kv_heads: expected 2, found 32"),
        ("F16", [1, 1, W, 2 * DIM], r"layers\[0\]\.kv_heads: expected 2, found 1"),
    ],
)
def test_rows_of_another_shape_are_refused(
    dtype: str, shape: list[int], field: str, model: MlxLmModel
) -> None:
    def change(parts: dict[str, Any]) -> None:
        for role in range(2):
            parts["tensors"][f"0.{role}"][:2] = [dtype, shape]

    with pytest.raises(CacheMismatchError, match=field):
        model.read(changed(change), tokens(POSITION))


def test_token_ids_must_be_as_many_as_the_cache_holds(model: MlxLmModel) -> None:
    data = encoded(blank_file())
    for count in (0, POSITION - 1, POSITION + 1):
        expected = f"token_ids: expected {POSITION}, as the cache holds, found {count}"
        with pytest.raises(CacheMismatchError, match=expected):
            model.read(data, tokens(count))
    for bad in (-1, 10**6):
        with pytest.raises(LimitError, match="an id outside"):
            model.read(data, [*tokens(POSITION - 1), bad])


def test_more_tokens_than_the_context_are_refused(model: MlxLmModel) -> None:
    with pytest.raises(LimitError, match="the model's context"):
        position = 131_073
        parts = blank_file(position=position)
        set_rows(3, position)(parts)
        model.read(encoded(parts), [1] * position)


def test_no_file_of_the_model_is_longer_than_the_bound_says(model: MlxLmModel) -> None:
    assert len(encoded(blank_file())) < model.file_bytes_max
    rows = 131_072 * 4 * 2 * HEADS * DIM * 2
    assert rows < model.file_bytes_max < 1.1 * rows


def test_the_layout_is_asked_layer_by_layer(load: Callable[[ModelCase], engine.Model]) -> None:
    layers = read_layers(parse_tensor_file(encoded(blank_file())))
    layout = load(ModelCase("muse_glimmer", "float16", window=W)).layout
    require_layout(layers, layout)
    assert layout.encoding is Encoding.F16LE


def test_the_pack_does_not_depend_on_names_in_the_file(model: MlxLmModel) -> None:
    """Model path and other notes of the saver are not read, let alone believed."""
    plain = to_pack(model, encoded(blank_file()), tokens(POSITION))
    noted = changed(set_metadata("0.model", "https://elsewhere.invalid/model"))
    assert to_pack(model, noted, tokens(POSITION)) == plain
    assert b"elsewhere" not in from_pack(model, plain)
