"""What a query sees: the definition ``p - window + 1 … p``, and exactly nothing outside it."""

from __future__ import annotations

import numpy as np
import pytest
from oracle_cases import ARCHITECTURES, HYBRIDS, make_case, token_ids

from engine.oracle import OracleModel, build_oracle
from engine.oracle.attention import attend, visible
from engine.oracle.plane import HistoryPlane, empty_plane

WINDOW = 8
LENGTH = 3 * WINDOW + 1


def one_layer(architecture: str, kind: str) -> OracleModel:
    """The model cut down to its first layer, which slides or is full as asked."""
    case = make_case(architecture, WINDOW)
    config = {**case.config, "num_hidden_layers": 1}
    if "layer_types" in config:
        config["layer_types"] = [kind]
    if architecture == "exaone4":
        config["sliding_window_pattern"] = "L" if kind == "sliding_attention" else "G"
    if architecture in ("cohere2", "gemma3_text"):
        config["sliding_window_pattern"] = 2 if kind == "sliding_attention" else 1
    tensors = {
        name: value
        for name, value in case.tensors.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    return build_oracle(config, tensors)


def changed_positions(model: OracleModel, at: int) -> list[int]:
    """Positions whose logits differ in any bit when the token at ``at`` is another one."""
    ids = token_ids(LENGTH)
    other = [*ids[:at], (ids[at] + 1) % 97, *ids[at + 1 :]]
    before, after = model.new_session().append(ids), model.new_session().append(other)
    return [position for position in range(LENGTH) if np.any(before[position] != after[position])]


@pytest.mark.parametrize("at", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_token_is_seen_by_exactly_one_window_of_queries(architecture: str, at: int) -> None:
    """Through one sliding layer: bits change at ``at … at + W - 1`` and nowhere else."""
    model = one_layer(architecture, "sliding_attention")
    assert changed_positions(model, at) == list(range(at, min(at + WINDOW, LENGTH)))


@pytest.mark.parametrize("distance", [WINDOW - 1, WINDOW, WINDOW + 1])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_edge_of_the_window_in_single_steps(architecture: str, distance: int) -> None:
    """The query at p sees p - W + 1 (distance W - 1); it does not see p - W, nor p - W - 1."""
    model, position = one_layer(architecture, "sliding_attention"), LENGTH - 1
    ids = token_ids(LENGTH)
    other = list(ids)
    other[position - distance] = (other[position - distance] + 1) % 97
    results = []
    for stream in (ids, other):
        session = model.new_session()
        for token in stream[:-1]:
            session.prefill([token])
        results.append(session.append(stream[-1:]))
    assert np.any(results[0] != results[1]) == (distance < WINDOW)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_full_layer_sees_everything_before(architecture: str) -> None:
    model = one_layer(architecture, "full_attention")
    assert changed_positions(model, 1) == list(range(1, LENGTH))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_token_changes_what_came_before_it(architecture: str) -> None:
    """Causality through the whole stack, to the bit."""
    model = make_case(architecture, WINDOW).oracle()
    for at in (1, WINDOW, LENGTH - 1):
        assert changed_positions(model, at)[0] == at


@pytest.mark.parametrize("window", [1, 2, 7, 8, None])
def test_the_mask_is_the_definition(window: int | None) -> None:
    for first, end, oldest in [(0, 1, 0), (0, 20, 0), (13, 20, 5), (19, 20, 0), (16, 17, 9)]:
        mask = visible(first, end, oldest, window)
        for row, query in enumerate(range(first, end)):
            for column, key in enumerate(range(oldest, end)):
                inside = key <= query and (window is None or query - key < window)
                assert mask[row, column] == inside, (query, key)


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0, 3.0, 0.0])])
def test_a_row_outside_the_window_has_no_influence_at_all(sinks: np.ndarray | None) -> None:
    """A not-a-number planted one row before the window would poison any sum it took part in."""
    rng = np.random.default_rng(5)
    queries, keys, values = (
        rng.normal(size=(LENGTH, heads, 6)).astype(np.float32) for heads in (4, 2, 2)
    )
    clean = HistoryPlane(keys.copy(), values.copy())
    keys[LENGTH - 1 - WINDOW], values[LENGTH - 1 - WINDOW] = np.nan, np.nan
    poisoned = HistoryPlane(keys, values)
    last = queries[-1:]
    expected = attend(last, clean, LENGTH - 1, WINDOW, 0.4, sinks)
    assert np.array_equal(attend(last, poisoned, LENGTH - 1, WINDOW, 0.4, sinks), expected)
    assert np.isnan(attend(last, poisoned, LENGTH - 1, WINDOW + 1, 0.4, sinks)).all()


def test_attention_with_sinks_is_the_formula() -> None:
    """One head, written out: a sink takes weight and adds no value."""
    rng = np.random.default_rng(6)
    query = rng.normal(size=(1, 1, 4)).astype(np.float32)
    keys, values = rng.normal(size=(2, 3, 1, 4)).astype(np.float32)
    sink = 0.7
    powers = [np.exp(0.5 * float(query[0, 0].astype(float) @ key[0].astype(float))) for key in keys]
    total = sum(powers) + np.exp(sink)
    weighted = [p / total * v[0].astype(float) for p, v in zip(powers, values, strict=True)]
    expected = sum(weighted)
    plane = HistoryPlane(keys, values)
    found = attend(query, plane, 2, None, 0.5, np.array([sink]))
    assert np.abs(found[0, 0] - expected).max() < 1e-6


def test_a_plane_refuses_gaps_and_rows_it_does_not_hold() -> None:
    plane = empty_plane(2, 4, 4)
    rows = np.ones((3, 2, 4), np.float32)
    plane.write(0, rows, rows)
    with pytest.raises(ValueError, match="expected position 3, got 4"):
        plane.write(4, rows, rows)
    with pytest.raises(ValueError, match=r"rows \[0, 3\) are held, \[2, 4\) was asked for"):
        plane.rows(2, 4)
    with pytest.raises(ValueError, match="3 key rows but 2 value rows"):
        HistoryPlane(rows, rows[:2])


def test_a_plane_grows_without_losing_rows_and_rewrites_from_a_position() -> None:
    plane = empty_plane(1, 1, 1)
    numbers = np.arange(700, dtype=np.float32).reshape(-1, 1, 1)
    for at in range(0, 700, 70):
        plane.write(at, numbers[at : at + 70], -numbers[at : at + 70])
    keys, values = plane.rows(0, 700)
    assert np.array_equal(keys, numbers)
    assert np.array_equal(values, -numbers)
    plane.write(10, numbers[:2], numbers[:2])
    assert plane.length == 12
    assert plane.rows(9, 12)[0].ravel().tolist() == [9.0, 0.0, 1.0]
