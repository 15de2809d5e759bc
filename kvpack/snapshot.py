"""The one type that crosses between node, engine and format: host rows of a session, in order.

A snapshot is a value. Its rows are in logical order (oldest first), never in ring order: where a
ring happens to begin is a function of the position and is rebuilt on install. Its tiles are cut on
the fixed grid, so a tile's bytes are a chunk's plaintext as they stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvpack import limits
from kvpack.errors import LayoutMismatchError
from kvpack.layout import CacheLayout, Encoding, LayerKind, Producer, grid_ranges, layer_groups


@dataclass(frozen=True, slots=True)
class TileSpec:
    """Which rows a tile holds: some layers of one kind, one range inside one grid block.

    Attributes:
        kind: Kind of all its layers.
        layers: Layer indices, ascending.
        first_position: Absolute position of the first row.
        token_count: Rows per layer.

    Raises:
        LimitError: A field is outside its cap.
        LayoutMismatchError: The range crosses a grid edge, or the layers are not ascending.
    """

    kind: LayerKind
    layers: tuple[int, ...]
    first_position: int
    token_count: int

    def __post_init__(self) -> None:
        limits.check_range("tile.layers", len(self.layers), 1, limits.LAYERS_MAX)
        limits.check_range("tile.first_position", self.first_position, 0, limits.POSITION_MAX - 1)
        limits.check_range("tile.token_count", self.token_count, 1, limits.GRID_TOKENS)
        ascending = self.layers == tuple(sorted(set(self.layers)))
        if not ascending or self.layers[0] < 0:
            raise LayoutMismatchError("tile.layers", "ascending layer indices", self.layers)
        offset = self.first_position % limits.GRID_TOKENS
        if offset + self.token_count > limits.GRID_TOKENS:
            raise LayoutMismatchError(
                "tile.token_count", f"<= {limits.GRID_TOKENS - offset} rows", self.token_count
            )

    @property
    def end_position(self) -> int:
        """One past the last row's position."""
        return self.first_position + self.token_count

    def data_bytes(self, layout: CacheLayout) -> int:
        """Plaintext bytes of the tile under ``layout``.

        Raises:
            LayoutMismatchError: A layer does not exist in ``layout`` or is of another kind.
        """
        return layout.group_row_bytes(self.kind, self.layers) * self.token_count


@dataclass(frozen=True, slots=True, repr=False)
class Tile:
    """The rows of one :class:`TileSpec`, as immutable host bytes.

    Attributes:
        spec: Which rows.
        data: For each layer of ``spec.layers`` in order: keys ``[token_count, kv_heads, key_dim]``,
            then values ``[token_count, kv_heads, value_dim]``; row-major, little-endian, unpadded.
            ``bytes`` or a read-only ``memoryview`` of bytes.
    """

    spec: TileSpec
    data: bytes | memoryview

    def __repr__(self) -> str:
        return f"Tile({self.spec!r}, {len(self.data)} bytes)"

    def planes(self, layout: CacheLayout) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Yield ``(layer, key_rows, value_rows)`` for each layer; byte views, no copy.

        Raises:
            LayoutMismatchError: The data does not have the size that ``layout`` implies.
        """
        expected = self.spec.data_bytes(layout)
        if len(self.data) != expected:
            raise LayoutMismatchError("tile.data_bytes", expected, len(self.data))
        view, offset = memoryview(self.data), 0
        for layer in self.spec.layers:
            key_bytes = layout.key_row_bytes(layer) * self.spec.token_count
            value_bytes = layout.value_row_bytes(layer) * self.spec.token_count
            middle = offset + key_bytes
            yield layer, view[offset:middle], view[middle : middle + value_bytes]
            offset = middle + value_bytes


def tile_specs(layout: CacheLayout, kind: LayerKind, first: int, end: int) -> Iterator[TileSpec]:
    """Yield the tiles that hold rows ``[first, end)`` of ``kind``: by range, then by layer group.

    For SWA, rows before a group's own window at ``end`` are left out: they are not live.
    """
    groups = layer_groups(layout, kind)
    for position, count in grid_ranges(first, end):
        for group in groups:
            live_from = layout.layers[group[0]].first_row(end)
            start = max(position, live_from)
            if start < position + count:
                yield TileSpec(kind, group, start, position + count - start)


def cut_tile_specs(layout: CacheLayout, position: int) -> tuple[TileSpec, ...]:
    """All tiles of a cut after ``position`` tokens: full layers from 0, then the SWA windows."""
    full = tile_specs(layout, LayerKind.FULL, 0, position)
    swa = tile_specs(layout, LayerKind.SWA, 0, position)
    return (*full, *swa)


@dataclass(frozen=True, slots=True, repr=False)
class SessionCacheSnapshot:
    """The KV state of one session after exactly ``position`` tokens.

    Construction is the fail-closed shape gate: a value that exists has, for every SWA layer,
    exactly ``min(position, window)`` rows ending at ``position``; for every full layer exactly
    ``position`` rows from 0; each row once; byte lengths exact to the element.

    Not included: sampler state, pending tokens, tokenizer, text.

    Attributes:
        layout: What every tile was checked against.
        producer: Who computed the rows.
        position: Tokens that the state stands for; also the next position to be computed.
        token_ids: Exactly ``position`` ids, in order. They are the user's text.
        tiles: The rows, in any order.

    Raises:
        LayoutMismatchError: Names layer, field, expected and found.
        LimitError: ``position`` or a token id is outside its cap.
    """

    layout: CacheLayout
    producer: Producer
    position: int
    token_ids: tuple[int, ...]
    tiles: tuple[Tile, ...]

    def __post_init__(self) -> None:
        limits.check_range("position", self.position, 0, self.layout.max_context_tokens)
        if len(self.token_ids) != self.position:
            raise LayoutMismatchError("token_ids", f"{self.position} ids", len(self.token_ids))
        if self.token_ids:
            limits.check_range("token_ids.min", min(self.token_ids), 0, limits.TOKEN_ID_MAX)
            limits.check_range("token_ids.max", max(self.token_ids), 0, limits.TOKEN_ID_MAX)
        check_producer_encoding(self.producer, self.layout.encoding)
        check_coverage(self.layout, self.position, [tile.spec for tile in self.tiles])
        for tile in self.tiles:
            expected = tile.spec.data_bytes(self.layout)
            if len(tile.data) != expected:
                raise LayoutMismatchError("tile.data_bytes", expected, len(tile.data))

    def __repr__(self) -> str:
        return f"SessionCacheSnapshot(position={self.position}, {len(self.tiles)} tiles)"


def check_producer_encoding(producer: Producer, encoding: Encoding) -> None:
    """The oracle writes F32LE and nothing else.

    Raises:
        LayoutMismatchError: The oracle with a half-precision encoding.
    """
    if producer is Producer.ORACLE and encoding is not Encoding.F32LE:
        raise LayoutMismatchError("encoding", "f32le for producer oracle", encoding.value)


def check_coverage(
    layout: CacheLayout, position: int, specs: Sequence[TileSpec], held: int = 0
) -> None:
    """Check that ``specs`` hold every row of the cut at ``position`` exactly once, and no other.

    Args:
        layout: The shape.
        position: The cut.
        specs: Which rows are there.
        held: Rows before this position are somewhere else: the parent's cut of a delta.

    Raises:
        LayoutMismatchError: The field is ``layers[i].first_position``, ``layers[i].rows`` or
            ``layers[i].kind``.
    """
    # A cut has few layer groups and many tiles: a group's ranges are held once for all its layers.
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for spec in specs:
        spec.data_bytes(layout)
        groups.setdefault(spec.layers, []).append((spec.first_position, spec.end_position))
    check_runs(layout, position, groups, held)


def check_runs(
    layout: CacheLayout,
    position: int,
    groups: Mapping[tuple[int, ...], Sequence[tuple[int, int]]],
    held: int = 0,
) -> None:
    """As :func:`check_coverage`, of ``(first, end)`` of the rows that are there of each group.

    Raises:
        LayoutMismatchError: The field is ``layers[i].first_position`` or ``layers[i].rows``.
    """
    holding: list[list[Sequence[tuple[int, int]]]] = [[] for _ in layout.layers]
    for layers, pieces in groups.items():
        for layer in layers:
            holding[layer].append(pieces)
    for layer, lists in enumerate(holding):
        first = max(held, layout.layers[layer].first_row(position))
        _check_layer_coverage(layer, first, position, sorted(itertools.chain(*lists)))


def _check_layer_coverage(
    layer: int, expected_first: int, position: int, pieces: list[tuple[int, int]]
) -> None:
    expected_rows = position - expected_first
    found_rows = sum(end - first for first, end in pieces)
    if pieces and pieces[0][0] != expected_first:
        raise LayoutMismatchError(f"layers[{layer}].first_position", expected_first, pieces[0][0])
    if found_rows != expected_rows:
        raise LayoutMismatchError(f"layers[{layer}].rows", expected_rows, found_rows)
    reached = expected_first
    for first, end in pieces:
        if first != reached:
            raise LayoutMismatchError(f"layers[{layer}].first_position", reached, first)
        reached = end
