"""Oracle snapshots: what they hold, that they continue to the bit, and who refuses whom."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from oracle_cases import ARCHITECTURES, make_case, token_ids

from engine.oracle import OracleModel, require_installable, restore_session, take_snapshot
from kvpack.errors import LayoutMismatchError, LimitError
from kvpack.layout import CacheLayout, Encoding, LayerKind, Producer
from kvpack.snapshot import SessionCacheSnapshot, Tile, cut_tile_specs

WINDOW = 8
LONGEST = 5 * WINDOW + 3


@functools.cache
def model_of(architecture: str, window: int = WINDOW) -> OracleModel:
    return make_case(architecture, window).oracle()


def snapshot_at(model: OracleModel, position: int) -> SessionCacheSnapshot:
    session = model.new_session()
    if position:
        session.prefill(token_ids(position))
    return take_snapshot(session)


def zero_snapshot(layout: CacheLayout, producer: Producer, position: int) -> SessionCacheSnapshot:
    specs = cut_tile_specs(layout, position)
    tiles = tuple(Tile(spec, bytes(spec.data_bytes(layout))) for spec in specs)
    return SessionCacheSnapshot(layout, producer, position, (0,) * position, tiles)


def engine_layout(layout: CacheLayout, encoding: Encoding) -> CacheLayout:
    return dataclasses.replace(layout, encoding=encoding)


@pytest.mark.parametrize("position", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, LONGEST])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_restored_session_continues_with_the_same_bits(architecture: str, position: int) -> None:
    """40 single tokens, then a chunk of 24, equal in every bit to a twin that was never cut."""
    model = model_of(architecture)
    twin = model.new_session()
    if position:
        twin.prefill(token_ids(position))
    restored = restore_session(model, take_snapshot(twin))
    assert (restored.position, restored.token_ids) == (position, tuple(token_ids(position)))
    following = token_ids(64, seed=12)
    for token in following[:40]:
        assert np.array_equal(restored.append([token]), twin.append([token]))
    assert np.array_equal(restored.append(following[40:]), twin.append(following[40:]))


def test_tiles_restore_in_any_order() -> None:
    model = model_of("muse_glimmer", 300)
    snapshot = snapshot_at(model, 700)
    assert len(snapshot.tiles) > 3
    turned = dataclasses.replace(snapshot, tiles=snapshot.tiles[::-1])
    step = [5]
    first = restore_session(model, snapshot).append(step)
    assert np.array_equal(restore_session(model, turned).append(step), first)


def test_a_snapshot_of_a_restored_session_equals_the_original() -> None:
    model = model_of("cohere2")
    snapshot = snapshot_at(model, LONGEST)
    again = take_snapshot(restore_session(model, snapshot))
    assert again == snapshot


@pytest.mark.parametrize("position", [1, WINDOW, LONGEST])
def test_a_snapshot_holds_the_session_s_own_rows(position: int) -> None:
    """Tile bytes are the rows at their absolute positions, keys before values, little-endian."""
    model = model_of("afmoe")
    session = model.new_session()
    session.prefill(token_ids(position))
    snapshot = take_snapshot(session)
    assert snapshot.producer is Producer.ORACLE
    seen = set()
    for tile in snapshot.tiles:
        for layer, keys, values in tile.planes(snapshot.layout):
            expected = session.rows(layer, tile.spec.first_position, tile.spec.end_position)
            assert np.array_equal(np.frombuffer(keys, "<f4"), expected[0].ravel())
            assert np.array_equal(np.frombuffer(values, "<f4"), expected[1].ravel())
            seen.add(layer)
    assert seen == {0, 1, 2, 3}


def test_a_restored_sliding_layer_has_no_older_rows_to_show() -> None:
    model = model_of("muse_glimmer")
    restored = restore_session(model, snapshot_at(model, LONGEST))
    restored.rows(0, LONGEST - WINDOW, LONGEST)
    with pytest.raises(ValueError, match="was asked for"):
        restored.rows(0, LONGEST - WINDOW - 1, LONGEST)
    restored.rows(3, 0, LONGEST)


def test_a_restored_session_shares_nothing_with_its_snapshot() -> None:
    model = model_of("muse_glimmer")
    snapshot = snapshot_at(model, LONGEST)
    before = [bytes(tile.data) for tile in snapshot.tiles]
    restore_session(model, snapshot).prefill(token_ids(20))
    assert [bytes(tile.data) for tile in snapshot.tiles] == before


@pytest.mark.parametrize("encoding", [Encoding.F16LE, Encoding.BF16LE])
def test_the_oracle_refuses_half_precision_by_encoding(encoding: Encoding) -> None:
    model = model_of("muse_glimmer")
    theirs = zero_snapshot(engine_layout(model.layout(), encoding), Producer.ENGINE, LONGEST)
    with pytest.raises(LayoutMismatchError) as caught:
        restore_session(model, theirs)
    assert caught.value.field == "encoding"
    assert (caught.value.expected, caught.value.found) == ("f32le", encoding.value)


@pytest.mark.parametrize("producer", [p for p in Producer if p is not Producer.ORACLE])
def test_the_oracle_refuses_float32_of_others_by_producer(producer: Producer) -> None:
    """An engine's float32 rows (experts on MLX's CPU) have the same layout to the last field."""
    model = model_of("afmoe")
    theirs = zero_snapshot(model.layout(), producer, LONGEST)
    with pytest.raises(LayoutMismatchError) as caught:
        restore_session(model, theirs)
    assert caught.value.field == "producer"
    assert (caught.value.expected, caught.value.found) == ("oracle", producer.value)


@pytest.mark.parametrize(
    ("encoding", "field"),
    [
        (Encoding.F16LE, "encoding"),
        (Encoding.BF16LE, "encoding"),
        (Encoding.F32LE, "producer"),
    ],
)
def test_an_engine_refuses_the_oracle_by_the_same_gate(encoding: Encoding, field: str) -> None:
    model = model_of("afmoe")
    ours = snapshot_at(model, LONGEST)
    with pytest.raises(LayoutMismatchError) as caught:
        require_installable(engine_layout(model.layout(), encoding), Producer.ENGINE, ours)
    assert caught.value.field == field


def test_the_gate_lets_others_install_each_other_s_snapshots() -> None:
    layout = engine_layout(model_of("muse_glimmer").layout(), Encoding.F16LE)
    for producer in (Producer.ENGINE, Producer.TRANSFORMERS, Producer.MLX_LM):
        require_installable(layout, Producer.ENGINE, zero_snapshot(layout, producer, 3))


def test_the_gate_names_the_layout_field_that_differs() -> None:
    model, other = model_of("muse_glimmer"), model_of("muse_glimmer", WINDOW + 1)
    with pytest.raises(LayoutMismatchError) as caught:
        restore_session(model, snapshot_at(other, LONGEST))
    assert caught.value.field == "layers[0].window_tokens"


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    model = model_of("muse_glimmer")
    snapshot = snapshot_at(model, 2)
    with pytest.raises(LimitError):
        restore_session(model, dataclasses.replace(snapshot, token_ids=(0, model.vocab_size)))


def test_a_refused_restore_leaves_the_live_session_alone() -> None:
    model = model_of("muse_glimmer")
    live = model.new_session()
    live.prefill(token_ids(LONGEST))
    before = take_snapshot(live)
    with pytest.raises(LayoutMismatchError):
        restore_session(model, zero_snapshot(model.layout(), Producer.ENGINE, 3))
    assert take_snapshot(live) == before


def test_layouts_state_kinds_windows_and_rotations() -> None:
    layout = model_of("muse_glimmer").layout()
    assert layout.encoding is Encoding.F32LE
    assert layout.max_context_tokens == 4096
    assert [layer.kind for layer in layout.layers] == [LayerKind.SWA] * 3 + [LayerKind.FULL]
    assert [layer.window_tokens for layer in layout.layers] == [8, 8, 8, None]
    assert [layer.rope is None for layer in layout.layers] == [False, False, False, True]
    assert model_of("cohere2").layout().layers[0].rope.interleaved
    assert all(layer.rope is not None for layer in model_of("gemma3_text").layout().layers)
