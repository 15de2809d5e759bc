"""Saved caches of mlx-lm as parts that a test can change, without mlx-lm."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from engine.interchange_file import header_of

W, POSITION = 8, 21
#: Physical sizes of one saved layer of the tiny model.
HEADS, DIM = 2, 32

Change = Callable[[dict[str, Any]], None]


def blank_file(layers: str = "RRRF", window: int = W, position: int = POSITION) -> dict[str, Any]:
    """A saved cache as its parts: metadata, and ``[dtype, shape, bytes]`` by name."""
    tensors: dict[str, list[Any]] = {}
    metadata = {"0.model": "somewhere", "2.0": ""}
    numbers = []
    for layer, kind in enumerate(layers):
        rows = 256 if kind == "F" else min(window, position)
        metadata[f"1.{layer}"] = "KVCache" if kind == "F" else "RotatingKVCache"
        for role in range(2):
            data = bytes([16 * role + layer]) * (2 * HEADS * rows * DIM)
            tensors[f"{layer}.{role}"] = ["F16", [1, HEADS, rows, DIM], data]
        index = position if position < window else (position % window) or window
        values = [position] if kind == "F" else [position, 0, window, index]
        for entry, value in enumerate(values, 2):
            tensors[f"{layer}.{entry}"] = ["I32", [], struct.pack("<i", value)]
            numbers.append(f"{layer}.{entry}")
    for entry, name in enumerate(numbers, 1):
        metadata |= {f"2.{entry}.0": name, f"2.{entry}.1": "scalar"}
    return {"metadata": metadata, "tensors": tensors}


def encoded(parts: dict[str, Any]) -> bytes:
    listed = [(name, dtype, shape) for name, (dtype, shape, _) in parts["tensors"].items()]
    body = b"".join(data for _, _, data in parts["tensors"].values())
    return header_of(listed, parts["metadata"]) + body


def with_header(change: Change) -> bytes:
    """A file whose JSON header was changed and nothing else."""
    data = encoded(blank_file())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def changed(change: Change) -> bytes:
    parts = blank_file()
    change(parts)
    return encoded(parts)


def raw_header(text: bytes, body: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + body


def set_number(name: str, value: int) -> Change:
    def change(parts: dict[str, Any]) -> None:
        parts["tensors"][name][2] = struct.pack("<i", value)

    return change


def set_metadata(name: str, value: str | None) -> Change:
    def change(parts: dict[str, Any]) -> None:
        parts["metadata"][name] = value
        if value is None:
            del parts["metadata"][name]

    return change


def set_offset(value: int) -> Change:
    def change(parts: dict[str, Any]) -> None:
        for layer, number in ((0, 2), (1, 2), (2, 2), (3, 2)):
            parts["tensors"][f"{layer}.{number}"][2] = struct.pack("<i", value)

    return change


def set_rows(layer: int, rows: int) -> Change:
    def change(parts: dict[str, Any]) -> None:
        for role in range(2):
            data = bytes(2 * HEADS * rows * DIM)
            parts["tensors"][f"{layer}.{role}"] = ["F16", [1, HEADS, rows, DIM], data]

    return change


def drop(name: str) -> Change:
    return lambda parts: parts["tensors"].pop(name)


def add(name: str) -> Change:
    return lambda parts: parts["tensors"].update({name: ["I32", [], bytes(4)]})


def retype(name: str, dtype: str, shape: list[int]) -> Change:
    def change(parts: dict[str, Any]) -> None:
        parts["tensors"][name][:2] = [dtype, shape]

    return change
