"""Safetensors bytes: what decodes exactly, and what is refused before memory is taken."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.oracle import decode_safetensors
from kvpack.errors import FormatError, LimitError

VALUES = np.array([[1.5, -2.25, 0.0], [3e-3, 65504.0, -1.0]], np.float32)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_files_of_mlx_decode_to_the_same_values(dtype: mx.Dtype, tmp_path: Any) -> None:
    stored = {"a.weight": mx.array(VALUES).astype(dtype), "b": mx.array([7.0]).astype(dtype)}
    path = tmp_path / "model.safetensors"
    mx.save_safetensors(str(path), stored, {"format": "mlx"})
    found = decode_safetensors(path.read_bytes())
    assert sorted(found) == ["a.weight", "b"]
    for name, array in stored.items():
        assert found[name].dtype == np.float32
        assert np.array_equal(found[name], np.array(array.astype(mx.float32)))


def test_every_bfloat16_decodes_to_its_own_value() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    data = file_of({"x": entry("BF16", [1 << 16], [0, 1 << 17])}, bits.astype("<u2").tobytes())
    found = decode_safetensors(data)["x"].view(np.uint32)
    assert np.array_equal(found, bits.astype(np.uint32) << 16)


def test_no_tensor_and_an_empty_tensor_decode() -> None:
    assert decode_safetensors(file_of({}, b"")) == {}
    empty = decode_safetensors(file_of({"x": entry("F16", [0, 3], [0, 0])}, b""))
    assert empty["x"].shape == (0, 3)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "safetensors.bytes"),
        (bytes(7), "safetensors.bytes"),
        (file_of({"x": entry()})[:20], "safetensors.header_bytes"),
        (file_of(b"not json"), "safetensors.header"),
        (file_of(b"\xff\xfe"), "safetensors.header"),
        (file_of(b"[" * 100_000), "safetensors.header"),
        (file_of([1]), "safetensors.header"),
        (file_of(b'{"x": {}, "x": {}}'), "safetensors.header"),
        (file_of({"x": 3}), "x"),
        (file_of({"x": entry("I64", [1])}), "x.dtype"),
        (file_of({"x": entry(["F32"])}), "x.dtype"),
        (file_of({"x": entry(shape=[-2])}), "x.shape"),
        (file_of({"x": entry(shape=[True, 2])}), "x.shape"),
        (file_of({"x": entry(shape="2")}), "x.shape"),
        (file_of({"x": entry(shape=[3])}), "x.data_bytes"),
        (file_of({"x": entry(offsets=[8, 0])}), "x.data_offsets"),
        (file_of({"x": entry(offsets=[0, 8, 9])}), "x.data_offsets"),
        (file_of({"x": entry(offsets=[4, 12])}, bytes(12)), "x.data_offsets[0]"),
        (file_of({"x": entry(), "y": entry()}), "y.data_offsets[0]"),
        (file_of({"x": entry()}, bytes(9)), "safetensors.data_bytes"),
        (file_of({"x": entry()}, bytes(7)), "safetensors.data_bytes"),
        (file_of({"x": entry(shape=[1 << 70], offsets=[0, 1 << 72])}), "safetensors.data_bytes"),
    ],
)
def test_broken_files_are_refused_by_name(data: bytes, field: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_safetensors(data)
    assert caught.value.field == field


def test_a_header_above_its_cap_is_refused_before_it_is_read() -> None:
    with pytest.raises(LimitError) as caught:
        decode_safetensors((100_000_001).to_bytes(8, "little"))
    assert caught.value.field == "safetensors.header_bytes"
