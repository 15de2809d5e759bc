"""Blocks wider than the ring: what stays of one has scrolled out, and is proved all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prove_support import tiny

from engine import Model, load_model
from engine.checkpoint_planes import PlaneMark
from kvpack.errors import LayoutMismatchError
from kvpack.snapshot import tile_specs
from node.prove.cases import History, RollbackStation
from node.prove.cuts import make_key
from node.prove.reader import Reader
from node.prove.sessions import live_session, token_stream
from node.prove.writer import Writer

W, N = 8, 16
STATION = RollbackStation("r0", History.of("chunks", [11, 2 * W]), tuple((N, k) for k in (1, 3, 8)))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load_model(tiny(tmp_path / "model", window=W))


@pytest.fixture
def reader(model: Model, tmp_path: Path) -> Reader:
    """Reads what a writer has left of every case of the station."""
    folder = tmp_path / "cuts"
    folder.mkdir()
    make_key(folder)
    written = Writer(model, folder).rollback(STATION)
    assert written.control.equal_steps == written.control.steps > 0
    return Reader(model, folder)


def test_every_part_of_it_is_what_the_layers_handed_over(reader: Reader) -> None:
    for count, kept in STATION.blocks:
        found = reader.rollback(STATION, count, kept)
        assert found.equal_steps == found.steps > N and found.equal_states == found.states == 2


def shifted(real: Callable[[PlaneMark, int], tuple]) -> Callable[[PlaneMark, int], tuple]:
    """Keeps the rows after those that it should: right in number, wrong in place."""

    def first_noted(self: PlaneMark, count: int) -> tuple:
        keys, values = real(self, count + 1)
        return keys[:, :, 1:], values[:, :, 1:]

    return first_noted


def test_a_checkpoint_that_keeps_other_rows_is_found(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlaneMark, "_first_noted", shifted(PlaneMark._first_noted))
    for count, kept in STATION.blocks:
        found = reader.rollback(STATION, count, kept)
        assert found.equal_states < found.states


def test_an_observed_call_hands_out_its_own_rows_alone(model: Model) -> None:
    from engine import ObservedCall

    session = live_session(model, STATION.history)
    position = session.position
    seen = ObservedCall(model, session, token_stream(model.vocab_size, N))
    assert len(seen.logits) == N and seen.first_position == position
    (*_, last) = tile_specs(model.layout, model.layout.layers[0].kind, 0, position + N)
    assert seen.tile(last).spec == last
    (first, *_) = tile_specs(model.layout, model.layout.layers[-1].kind, 0, position)
    with pytest.raises(LayoutMismatchError, match="rows"):
        seen.tile(first)
