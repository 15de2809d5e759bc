"""Prompt caches as mlx-lm 0.32 saves them: which tensors there are, and where their rows lie.

The file is a flattened list of one state per layer::

    i.0, i.1    keys, values      [1, kv_heads, rows, dim]
    i.2         offset            tokens seen so far
    i.3..i.5    keep, max_size, _idx   of a rotating cache only
    metadata    0.*   what the saver wrote       1.i   class of layer i
                2.0   empty       2.j.0, 2.j.1   name of a tensor that is a number, and "scalar"

Theory. A full cache holds the rows of positions ``[0, offset)`` in its first rows; what follows is
spare room, or rows that were taken back. A rotating cache of window W is in one of three states:

- *filling*, ``offset < W``: as a full one; ``_idx`` is the offset.
- *wide*, more than W rows: a prefill call left them in order, the last W are the window. ``_idx``
  is their number.
- *ring*, exactly W rows: the oldest lies at ``head = _idx mod W``. Where that is depends on the
  calls that led here, so it is data, and travels as ``foreign_ring_head``.

Between calls there is no other state; whatever is none of these is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.interchange_file import StoredTensor, TensorFile, refuse
from kvpack.interchange import CacheFormatError, CacheMismatchError
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout

FORMAT: Final = "mlx-lm 0.32 prompt cache"

_FULL: Final = "KVCache"
_RING: Final = "RotatingKVCache"

#: Tensors of one layer by class: keys and values, then the numbers.
_NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    _FULL: ("offset",),
    _RING: ("offset", "keep", "max_size", "_idx"),
}

DTYPES: Final[Mapping[Encoding, str]] = {
    Encoding.F16LE: "F16",
    Encoding.BF16LE: "BF16",
    Encoding.F32LE: "F32",
}


@dataclass(frozen=True, slots=True, repr=False)
class SavedLayer:
    """The cache of one layer.

    Attributes:
        keys: ``[1, kv_heads, rows, key_dim]``.
        values: ``[1, kv_heads, rows, value_dim]``.
        offset: Tokens seen so far.
        window_tokens: Of a rotating cache; None for a full one.
        first: Physical row of the oldest row that is live.
        head: Physical row of the oldest row of a ring; 0 in every other state.
    """

    keys: StoredTensor
    values: StoredTensor
    offset: int
    window_tokens: int | None
    first: int
    head: int

    @property
    def rows(self) -> int:
        """Physical rows."""
        return self.keys.shape[2]


def read_layers(file: TensorFile) -> tuple[SavedLayer, ...]:
    """The layers of a saved prompt cache.

    Raises:
        CacheFormatError: No prompt cache, one of another mlx-lm, or of a class that is not read.
        CacheFileError: It contradicts itself.
    """
    classes = _classes(file)
    expected = {
        f"{layer}.{index}": kind
        for layer, name in enumerate(classes)
        for index, kind in enumerate(("keys", "values", *_NUMBERS[name]))
    }
    if file.tensors.keys() != expected.keys():
        strange = min(file.tensors.keys() ^ expected.keys())
        found = "one more" if strange in file.tensors else "none"
        refuse(f"tensor {strange[:60]!r}", "exactly those of its layers", found)
    _require_scalars(file, {name for name, kind in expected.items() if kind in _NUMBERS[_RING]})
    layers = tuple(_layer(file, layer, name) for layer, name in enumerate(classes))
    for layer, saved in enumerate(layers):
        if saved.offset != layers[0].offset:
            refuse(f"layers[{layer}].offset", layers[0].offset, saved.offset)
    return layers


def _classes(file: TensorFile) -> list[str]:
    """Class of every layer, once the file is known to be of this format."""
    listed = {name[2:] for name in file.metadata if name.startswith("1.")}
    if file.metadata.get("2.0") in _NUMBERS:
        raise CacheFormatError("format", FORMAT, "a prompt cache of mlx-lm 0.31 or older")
    if file.metadata.get("2.0") != "" or not listed:
        raise CacheFormatError("format", FORMAT, "no prompt cache of mlx-lm")
    if listed != {str(layer) for layer in range(len(listed))}:
        refuse("metadata '1'", f"layers 0 to {len(listed) - 1}", "others")
    classes = [file.metadata[f"1.{layer}"] for layer in range(len(listed))]
    for layer, name in enumerate(classes):
        if name not in _NUMBERS:
            expected = f"{_FULL} or {_RING}"
            raise CacheFormatError(f"layers[{layer}].class", expected, repr(name[:60]))
    return classes


def _require_scalars(file: TensorFile, expected: set[str]) -> None:
    """The list of numbers in the metadata names exactly the numbers there are."""
    listed = {name: text for name, text in file.metadata.items() if name.startswith("2.")}
    entries = range(1, len(expected) + 1)
    names = [listed.pop(f"2.{entry}.0", "") for entry in entries]
    kinds = {listed.pop(f"2.{entry}.1", "") for entry in entries}
    listed.pop("2.0", None)
    if "none" in kinds | {listed.get(name, "") for name in listed}:
        raise CacheFormatError("cache", "at least one token", "an empty cache")
    if listed or kinds != {"scalar"} or len(names) != len(set(names)) or set(names) != expected:
        refuse("metadata '2'", "the numbers of its layers, each once", "something else")


def _layer(file: TensorFile, layer: int, name: str) -> SavedLayer:
    field = f"layers[{layer}]"
    keys, values = (file.tensors[f"{layer}.{index}"] for index in range(2))
    for role, tensor in (("keys", keys), ("values", values)):
        if len(tensor.shape) != 4 or tensor.shape[0] != 1:
            refuse(f"{field}.{role}.shape", "[1, kv_heads, rows, dim]", list(tensor.shape))
    if keys.shape[1:3] != values.shape[1:3] or keys.dtype != values.dtype:
        refuse(f"{field}.values", "heads, rows and dtype of its keys", list(values.shape))
    numbers = {
        number: _number(f"{field}.{number}", file.tensors[f"{layer}.{index}"])
        for index, number in enumerate(_NUMBERS[name], 2)
    }
    offset, rows = numbers["offset"], keys.shape[2]
    if offset < 1:
        refuse(f"{field}.offset", "at least one token", offset)
    if name == _FULL:
        if offset > rows:
            refuse(f"{field}.offset", f"at most {rows}, the rows there are", offset)
        return SavedLayer(keys, values, offset, None, 0, 0)
    if numbers["keep"]:
        raise CacheFormatError(f"{field}.keep", "0: a ring without a kept prefix", numbers["keep"])
    first, head = _ring_state(field, rows, numbers)
    return SavedLayer(keys, values, offset, numbers["max_size"], first, head)


def _ring_state(field: str, rows: int, numbers: Mapping[str, int]) -> tuple[int, int]:
    """``(first, head)`` of a rotating cache, which must be filling, wide or a ring."""
    offset, window, index = numbers["offset"], numbers["max_size"], numbers["_idx"]
    if window < 1:
        refuse(f"{field}.max_size", "a window of at least one token", window)
    if offset < window:
        if not offset <= rows <= window:
            refuse(f"{field}.rows", f"{offset} to {window}", rows)
        if index != offset:
            refuse(f"{field}._idx", f"{offset}, its offset", index)
        return 0, 0
    if not window <= rows <= offset:
        refuse(f"{field}.rows", f"{window} to {offset}", rows)
    if rows > window:
        if index != rows:
            refuse(f"{field}._idx", f"{rows}, its rows", index)
        return rows - window, 0
    if not 1 <= index <= window:
        refuse(f"{field}._idx", f"1 to {window}", index)
    return index % window, index % window


def _number(field: str, tensor: StoredTensor) -> int:
    if tensor.dtype != "I32" or tensor.shape != ():
        refuse(field, "one I32", f"{tensor.dtype} {list(tensor.shape)}")
    return int.from_bytes(tensor.data, "little", signed=True)


def require_layout(layers: Sequence[SavedLayer], layout: CacheLayout) -> None:
    """Refuse a file of another model, naming the first field that differs.

    Raises:
        CacheMismatchError: The field is a path such as ``layers[7].kv_heads``.
    """
    if len(layers) != len(layout.layers):
        raise CacheMismatchError("layers", len(layout.layers), len(layers))
    dtype = DTYPES[layout.encoding]
    for layer, (saved, shape) in enumerate(zip(layers, layout.layers, strict=True)):
        for field, expected, found in _differences(saved, shape, dtype):
            if expected != found:
                raise CacheMismatchError(f"layers[{layer}].{field}", expected, found)


def _differences(
    saved: SavedLayer, shape: LayerLayout, dtype: str
) -> Iterator[tuple[str, object, object]]:
    kind = LayerKind.FULL if saved.window_tokens is None else LayerKind.SWA
    yield "kind", shape.kind.value, kind.value
    yield "window_tokens", shape.window_tokens, saved.window_tokens
    yield "kv_heads", shape.kv_heads, saved.keys.shape[1]
    yield "key_dim", shape.key_dim, saved.keys.shape[3]
    yield "value_dim", shape.value_dim, saved.values.shape[3]
    yield "dtype", dtype, saved.keys.dtype


def layer_tensors(
    layer: int, shape: LayerLayout, encoding: Encoding, position: int
) -> list[tuple[str, str, Sequence[int]]]:
    """Names, dtypes and shapes of what is written for one layer: tight, no spare row."""
    rows, dtype = shape.held_rows(position), DTYPES[encoding]
    numbers = _NUMBERS[_FULL if shape.window_tokens is None else _RING]
    return [
        (f"{layer}.0", dtype, (1, shape.kv_heads, rows, shape.key_dim)),
        (f"{layer}.1", dtype, (1, shape.kv_heads, rows, shape.value_dim)),
        *((f"{layer}.{index}", "I32", ()) for index in range(2, 2 + len(numbers))),
    ]


def layer_numbers(shape: LayerLayout, position: int, head: int) -> bytes:
    """The numbers of one layer, in the order of :func:`layer_tensors`.

    Args:
        shape: The layer.
        position: Tokens that the state stands for.
        head: Physical row of the oldest row.
    """
    numbers = [position]
    if shape.window_tokens is not None:
        window = shape.window_tokens
        index = position if position < window else head or window
        numbers += [0, window, index]
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


def metadata_of(layout: CacheLayout, user: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file with one cache for each layer of ``layout``."""
    names = [_FULL if shape.window_tokens is None else _RING for shape in layout.layers]
    numbers = [
        f"{layer}.{index}"
        for layer, name in enumerate(names)
        for index in range(2, 2 + len(_NUMBERS[name]))
    ]
    metadata = {f"0.{name}": text for name, text in user.items()}
    metadata |= {f"1.{layer}": name for layer, name in enumerate(names)}
    metadata["2.0"] = ""
    for entry, number in enumerate(numbers, 1):
        metadata |= {f"2.{entry}.0": number, f"2.{entry}.1": "scalar"}
    return metadata
