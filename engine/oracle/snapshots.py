"""Between an oracle session and the host snapshot, and the gate that keeps strangers out.

A snapshot of the oracle looks like any other: logical order, the last window of every sliding
layer, all rows of every full one. Only its producer and its encoding say who computed it, and they
are what the gate reads first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.oracle.model import OracleModel, OracleSession
from engine.oracle.operators import Floats
from engine.oracle.plane import HistoryPlane
from kvpack import limits
from kvpack.errors import LayoutMismatchError
from kvpack.identity import require_same_layout
from kvpack.layout import CacheLayout, LayerLayout, Producer
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs


def require_installable(
    layout: CacheLayout, producer: Producer, snapshot: SessionCacheSnapshot
) -> None:
    """Refuse a snapshot that ``producer`` must not continue.

    The oracle and everybody else refuse each other always: by encoding where encodings differ, and
    by producer even where both are float32. Then every field of the layout must be equal. The rule
    is symmetric, so an engine can ask with its own layout and producer.

    Args:
        layout: The layout of whoever wants to install.
        producer: Who wants to install.
        snapshot: What is offered.

    Raises:
        LayoutMismatchError: The field is ``encoding``, ``producer``, or a path such as
            ``layers[7].kv_heads``.
    """
    offered = snapshot.layout.encoding
    if offered is not layout.encoding:
        raise LayoutMismatchError("encoding", layout.encoding.value, offered.value)
    if (producer is Producer.ORACLE) != (snapshot.producer is Producer.ORACLE):
        expected = "oracle" if producer is Producer.ORACLE else "any producer but oracle"
        raise LayoutMismatchError("producer", expected, snapshot.producer.value)
    require_same_layout(layout, snapshot.layout)


def take_snapshot(session: OracleSession) -> SessionCacheSnapshot:
    """The session at its position, as immutable host bytes.

    Raises:
        LimitError: The model's rows are too wide to be packed as float32.
    """
    layout = session.model.layout()
    specs = cut_tile_specs(layout, session.position)
    tiles = tuple(Tile(spec, _tile_bytes(session, spec)) for spec in specs)
    return SessionCacheSnapshot(layout, Producer.ORACLE, session.position, session.token_ids, tiles)


def _tile_bytes(session: OracleSession, spec: TileSpec) -> bytes:
    pieces = []
    for layer in spec.layers:
        keys, values = session.rows(layer, spec.first_position, spec.end_position)
        pieces += [keys.astype("<f4").tobytes(), values.astype("<f4").tobytes()]
    return b"".join(pieces)


def restore_session(model: OracleModel, snapshot: SessionCacheSnapshot) -> OracleSession:
    """A new session that continues ``snapshot`` with the bits the source would have computed.

    Nothing live is touched. Rows that a sliding layer no longer sees are not in a snapshot, and no
    later query reads them.

    Raises:
        LayoutMismatchError: The gate refuses; see :func:`require_installable`.
        LimitError: A token id is outside the vocabulary.
    """
    layout = model.layout()
    require_installable(layout, Producer.ORACLE, snapshot)
    for token in snapshot.token_ids:
        limits.check_range("token_ids", token, 0, model.vocab_size - 1)
    planes = [
        _plane(shape, snapshot.position, _pieces(layout, snapshot.tiles, index))
        for index, shape in enumerate(layout.layers)
    ]
    return OracleSession(model, snapshot.token_ids, planes)


def _pieces(
    layout: CacheLayout, tiles: Iterable[Tile], layer: int
) -> list[tuple[int, Floats, Floats]]:
    """``(first_position, keys, values)`` of one layer, ascending; arrays ``[rows, heads, dim]``."""
    shape = layout.layers[layer]
    pieces = []
    for tile in tiles:
        for index, key_rows, value_rows in tile.planes(layout):
            if index == layer:
                keys = _rows(key_rows, shape.kv_heads, shape.key_dim)
                values = _rows(value_rows, shape.kv_heads, shape.value_dim)
                pieces.append((tile.spec.first_position, keys, values))
    return sorted(pieces, key=lambda piece: piece[0])


def _rows(data: memoryview, kv_heads: int, dim: int) -> Floats:
    return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(-1, kv_heads, dim)


def _plane(
    shape: LayerLayout, position: int, pieces: list[tuple[int, Floats, Floats]]
) -> HistoryPlane:
    """The plane that holds exactly the pieces, which the snapshot's gate found to be complete."""
    no_keys = np.empty((0, shape.kv_heads, shape.key_dim), np.float32)
    no_values = np.empty((0, shape.kv_heads, shape.value_dim), np.float32)
    keys = np.concatenate([no_keys, *(keys for _, keys, _ in pieces)])
    values = np.concatenate([no_values, *(values for _, _, values in pieces)])
    return HistoryPlane(keys, values, shape.first_row(position))
