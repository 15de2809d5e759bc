"""The shapes that are moved, and how many bytes a cut of one has. Pure functions.

The reference geometry is Muse Glimmer's: 52 layers, of which every fourth attends to everything and
carries no position, the rest over a window of 2,048; 1,024 bytes for each layer and token.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvpack import limits
from kvpack.errors import LayoutMismatchError, LimitError
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout
from node.errors import UsageError

MUSE_GLIMMER: Final = "muse-glimmer"

_PERIODS: Final = 13
_WINDOW_TOKENS: Final = 2048
_MAX_CONTEXT_TOKENS: Final = 131_072
_THETA_BITS: Final = int.from_bytes(struct.pack(">d", 500_000.0), "big")

#: A description of a layout is a page of text.
_FILE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CutBytes:
    """K/V bytes of a cut that travel, by kind of layer."""

    nope_bytes: int
    swa_bytes: int

    @property
    def kv_bytes(self) -> int:
        """All of them."""
        return self.nope_bytes + self.swa_bytes


def cut_bytes(layout: CacheLayout, tokens: int, held_tokens: int = 0) -> CutBytes:
    """K/V bytes that travel for a prompt of ``tokens``, of which the target holds some.

    The boundary token is computed on both ends, so rows travel for one token less. Full layers
    travel from the held prefix on. Rows of a window are bound to their position: those before the
    held prefix's end are left out, and where the rest outruns the window the whole window travels.

    Raises:
        LimitError: No row is left to be moved, or the held prefix is not whole grid blocks.
    """
    position = limits.check_range("tokens", tokens, 2, layout.max_context_tokens) - 1
    limits.check_range("held_tokens", held_tokens, 0, position - 1, "tokens")
    if held_tokens % limits.GRID_TOKENS:
        raise LimitError("held_tokens", f"a multiple of {limits.GRID_TOKENS}", held_tokens)
    sizes = {
        kind: sum(
            (position - max(held_tokens, layout.layers[i].first_row(position)))
            * layout.row_bytes(i)
            for i in layout.layers_of(kind)
        )
        for kind in LayerKind
    }
    return CutBytes(sizes[LayerKind.FULL], sizes[LayerKind.SWA])


def window_bytes(layout: CacheLayout) -> int:
    """K/V bytes of all full rings: what a live session freezes for."""
    layers = enumerate(layout.layers)
    return sum((layer.window_tokens or 0) * layout.row_bytes(i) for i, layer in layers)


def muse_glimmer() -> CacheLayout:
    """The reference geometry of every benchmark here."""
    rope = RopeLayout(_THETA_BITS, 128, interleaved=True)
    swa = LayerLayout(LayerKind.SWA, _WINDOW_TOKENS, 2, 128, 128, rope)
    full = LayerLayout(LayerKind.FULL, None, 2, 128, 128)
    return CacheLayout((swa, swa, swa, full) * _PERIODS, Encoding.F16LE, _MAX_CONTEXT_TOKENS)


def read_layout(name: str) -> CacheLayout:
    """The layout of that name, or of the file of that name.

    A file holds one JSON object: ``encoding``, ``max_context_tokens``, ``layers`` (a list of
    objects with ``window_tokens`` or null, ``kv_heads``, ``key_dim``, ``value_dim``) and, where
    the list is to be taken several times, ``repeat``.

    Raises:
        UsageError: No such file, or not such an object; also LimitError for a value in it.
    """
    if name == MUSE_GLIMMER:
        return muse_glimmer()
    try:
        with Path(name).open("rb") as file:
            text = file.read(_FILE_BYTES_MAX)
        return _layout(json.loads(text))
    except OSError as error:
        raise UsageError(f"--layout {name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"--layout {name}: not a layout: {error}") from error


def _layout(read: dict[str, Any]) -> CacheLayout:
    layers = tuple(_layer(one) for one in read["layers"]) * _repeat(read)
    return CacheLayout(layers, Encoding(read["encoding"]), read["max_context_tokens"])


def _repeat(read: dict[str, Any]) -> int:
    return limits.check_range("repeat", read.get("repeat", 1), 1, limits.LAYERS_MAX)


def _layer(read: dict[str, Any]) -> LayerLayout:
    window = read["window_tokens"]
    kind = LayerKind.FULL if window is None else LayerKind.SWA
    try:
        return LayerLayout(kind, window, read["kv_heads"], read["key_dim"], read["value_dim"])
    except LayoutMismatchError as error:
        raise ValueError(str(error)) from error
