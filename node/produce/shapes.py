"""Which layouts a producer computes: all layers of a kind alike.

One buffer holds all layers of a kind, and the check before serving looks at the first layers of
each kind alone. A sliding layer with another rotation than the others would be computed unchecked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from engine.errors import ModelFolderError
from kvpack.layout import CacheLayout, LayerKind, LayerLayout, RopeLayout


def require_one_shape(layout: CacheLayout) -> None:
    """Refuse a layout whose layers of one kind differ, or whose keys and values do.

    Raises:
        ModelFolderError: Names layer and field, what was expected, and what was found.
    """
    for kind in LayerKind:
        members = layout.layers_of(kind)
        for index in members:
            first, layer = layout.layers[members[0]], layout.layers[index]
            if layer.key_dim != layer.value_dim:
                raise ModelFolderError(
                    f"layers[{index}].value_dim: expected {layer.key_dim}, as its keys have, "
                    f"found {layer.value_dim}"
                )
            for (name, expected), (_, found) in zip(_said(first), _said(layer), strict=True):
                if expected != found:
                    raise ModelFolderError(
                        f"layers[{index}].{name}: expected {expected}, as layers[{members[0]}] "
                        f"has ({kind.value} layers of a producer are all alike), found {found}"
                    )


def _said(layer: LayerLayout) -> Iterator[tuple[str, str]]:
    """What a layer is, field by field."""
    yield "rope", _rope(layer.rope)
    yield "window_tokens", str(layer.window_tokens)
    yield "kv_heads", str(layer.kv_heads)
    yield "key_dim", str(layer.key_dim)


def _rope(rope: RopeLayout | None) -> str:
    if rope is None:
        return "none"
    (theta,) = struct.unpack("<d", rope.theta_bits.to_bytes(8, "little"))
    pairs = "interleaved" if rope.interleaved else "half-split"
    rule = "" if rope.scaling == "none" else f", {rope.scaling}"
    return f"theta {theta:g} over {rope.dims} elements, {pairs}{rule}"
