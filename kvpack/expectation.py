"""What a pack is expected to be, from a JSON file: what ``kvpack inspect --json`` writes.

The file is somebody's claim about what *should* be there, so it is parsed as strictly as a pack:
every field that the expectation needs must be there, and no key twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from kvpack import limits
from kvpack.errors import FieldError, KvpackError
from kvpack.identity import DIGEST_BYTES, Identity
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout

#: Some hundred bytes a layer, for the most layers there may be, and as much again.
FILE_BYTES_MAX: Final = 1 << 20


class ExpectationError(KvpackError):
    """The file that says what is expected cannot be used. Nothing is said about any pack."""

    reason = "bad_expectation"


def load_layout(path: str | os.PathLike[str]) -> CacheLayout:
    """The layout in a file: ``encoding``, ``max_context_tokens`` and ``layers``.

    Raises:
        ExpectationError: The file cannot be read, or describes no layout.
    """
    where = os.fspath(path)
    try:
        return _layout(_load(where))
    except (KeyError, TypeError, ValueError, FieldError) as error:
        raise ExpectationError(f"{where}: no layout: {_why(error)}") from error


def load_identity(path: str | os.PathLike[str]) -> Identity:
    """The identity in a file: ``tenant``, ``identity``, and everything that a layout needs.

    Raises:
        ExpectationError: The file cannot be read, or describes no identity.
    """
    where = os.fspath(path)
    try:
        return _identity(_load(where))
    except (KeyError, TypeError, ValueError, FieldError) as error:
        raise ExpectationError(f"{where}: no identity: {_why(error)}") from error


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"field {error.args[0]!r} is missing"
    return " ".join(str(error).split())[:200]


def _load(path: str) -> Mapping[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ExpectationError(f"{path}: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ExpectationError(f"{path}: longer than {FILE_BYTES_MAX} bytes")
    try:
        found = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError as error:
        raise ExpectationError(f"{path}: nested too deeply") from error
    return _mapping(found, "the file")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")
    return value


def _integer(value: object, name: str) -> int:
    if type(value) is not int:
        raise TypeError(f"{name} is not a whole number")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is not text")
    return value


def _layout(found: Mapping[str, Any]) -> CacheLayout:
    layers = found["layers"]
    if not isinstance(layers, list) or len(layers) > limits.LAYERS_MAX:
        raise TypeError(f"layers is not a list of at most {limits.LAYERS_MAX}")
    return CacheLayout(
        layers=tuple(_layer(_mapping(layer, "a layer")) for layer in layers),
        encoding=Encoding(_text(found["encoding"], "encoding")),
        max_context_tokens=_integer(found["max_context_tokens"], "max_context_tokens"),
    )


def _layer(found: Mapping[str, Any]) -> LayerLayout:
    window, rope = found["window_tokens"], found["rope"]
    return LayerLayout(
        kind=LayerKind(_text(found["kind"], "kind")),
        window_tokens=None if window is None else _integer(window, "window_tokens"),
        kv_heads=_integer(found["kv_heads"], "kv_heads"),
        key_dim=_integer(found["key_dim"], "key_dim"),
        value_dim=_integer(found["value_dim"], "value_dim"),
        rope=None if rope is None else _rope(_mapping(rope, "rope")),
    )


def _rope(found: Mapping[str, Any]) -> RopeLayout:
    interleaved = found["interleaved"]
    if not isinstance(interleaved, bool):
        raise TypeError("interleaved is neither true nor false")
    return RopeLayout(
        theta_bits=_bits(found["theta_bits"], "theta_bits"),
        dims=_integer(found["dims"], "dims"),
        interleaved=interleaved,
        scaling=_text(found["scaling"], "scaling"),
    )


def _identity(found: Mapping[str, Any]) -> Identity:
    named = _mapping(found["identity"], "identity")
    constants = _mapping(named["constants"], "constants")
    return Identity(
        tenant=_text(found["tenant"], "tenant"),
        weights_digest=_digest(named, "weights_digest"),
        quantisation=_text(named["quantisation"], "quantisation"),
        adapter_digest=_digest(named, "adapter_digest"),
        tokenizer_digest=_digest(named, "tokenizer_digest"),
        chat_template_digest=_digest(named, "chat_template_digest"),
        engine_abi=_text(named["engine_abi"], "engine_abi"),
        layout=_layout(found),
        constants=tuple(sorted((name, _bits(bits, name)) for name, bits in constants.items())),
    )


def _digest(found: Mapping[str, Any], name: str) -> bytes:
    """A digest in hexadecimal; null where there is nothing to digest."""
    value = found[name]
    return bytes(DIGEST_BYTES) if value is None else bytes.fromhex(_text(value, name))


def _bits(value: object, name: str) -> int:
    """64 bits as JSON can carry them without loss: ``0x`` and sixteen digits."""
    text = _text(value, name)
    if len(text) != 18 or not text.startswith("0x"):
        raise ValueError(f"{name} is not 0x and sixteen digits")
    return int(text, 16)
