"""Seeded runs of the real drivers in one process: faults everywhere, then what must be so.

A run is a function of its seed and of the code; a seed that broke something breaks it again:
``run_seed(SEED, ...)``. See :mod:`model.sim_run` for what a run does and what is checked.
"""

from __future__ import annotations

import logging
import os
import shutil

import pytest

from engine import load_model
from kvpack.keys import generate_key
from model.sim_ends import Broken
from model.sim_model import HashInstaller, HashModel
from model.sim_run import run_seed
from model.sim_twin import Twin
from node.migration import inbound, source
from node.migration.receiver import Receiver
from node.migration.table import (
    SOURCE,
    SourceEffect,
    SourceEvent,
    SourceState,
    Step,
)

#: Runs of ``make test``, and of ``make test-faults`` in all its parts.
QUICK_RUNS = 60
ALL_RUNS = int(os.environ.get("SIM_RUNS", "10000"))
PARTS = 20

#: Runs in which a planted bug must show.
PLANTED_RUNS = 60


@pytest.fixture(scope="module")
def real_model(model_dir):
    return load_model(model_dir)


@pytest.fixture(scope="module")
def parts(real_model):
    """A model that only hashes, a key, and what sessions should give."""
    model = HashModel(real_model)
    return model, generate_key("tests"), Twin(model)


def run_all(seeds, root, parts, *, enough=10):
    """What each run came to; seeds that broke something are named, up to ``enough`` of them."""
    ended, broken = [], []
    logging.disable(logging.CRITICAL)  # thousands of faults, and each is logged
    try:
        for seed in seeds:
            folder = root / str(seed)
            folder.mkdir()
            try:
                ended.append(run_seed(seed, folder, *parts))
            except Broken as error:
                broken.append(str(error))
            shutil.rmtree(folder)
            if len(broken) == enough:
                break
    finally:
        logging.disable(logging.NOTSET)
    assert not broken, "\n".join(broken)
    return ended


def test_no_seeded_run_loses_a_session_or_gives_it_two_owners_or_wrong_bits(tmp_path, parts):
    ended = run_all(range(QUICK_RUNS), tmp_path, parts)
    # The runs are worth something only if much goes wrong in them, and much goes well.
    assert sum(one.moved for one in ended) > QUICK_RUNS / 2
    assert sum(one.crashes for one in ended) > QUICK_RUNS / 3
    assert sum(one.faults for one in ended) > 2 * QUICK_RUNS
    assert len({one.owner for one in ended}) == 3


def test_runs_of_the_real_engine_end_well_too(tmp_path, real_model):
    run_all(range(3), tmp_path, (real_model, generate_key("tests"), Twin(real_model)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_run_of_the_campaign_breaks_a_promise(tmp_path, parts, part):
    first = 1_000_000
    run_all(range(first + part, first + ALL_RUNS, PARTS), tmp_path, parts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_runs_of_the_real_engine_end_well_too(tmp_path, real_model):
    run_all(range(100, 160), tmp_path, (real_model, generate_key("tests"), Twin(real_model)))


def test_a_seed_gives_the_same_run_again(tmp_path, parts):
    first = run_all([7, 8, 9], tmp_path, parts)
    again = tmp_path / "again"
    again.mkdir()
    assert run_all([7, 8, 9], again, parts) == first


RELEASED = Step(SourceState.RELEASED, SourceEffect.RELEASE)
RESUMED = Step(SourceState.RESUMED, SourceEffect.THAW)


@pytest.mark.parametrize(
    ("pair", "step"),
    [
        ((SourceState.COMMITTING, SourceEvent.COMMIT_FAILED), RELEASED),
        ((SourceState.READING, SourceEvent.OWNER_SELF), RESUMED),
    ],
    ids=["released without reading", "resumed without a raise"],
)
def test_a_bug_planted_in_a_table_is_found_by_some_run(tmp_path, parts, monkeypatch, pair, step):
    monkeypatch.setattr(source, "SOURCE", {**SOURCE, pair: step})
    with pytest.raises(AssertionError, match="seed"):
        run_all(range(PLANTED_RUNS), tmp_path, parts, enough=1)


def test_a_commit_that_makes_nothing_durable_is_found_by_some_run(tmp_path, parts, monkeypatch):
    async def publish(self):
        """Say so, and do nothing."""

    monkeypatch.setattr(Receiver, "publish", publish)
    with pytest.raises(AssertionError, match="has nothing durable"):
        run_all(range(PLANTED_RUNS), tmp_path, parts, enough=1)


def test_a_model_whose_rows_arrive_changed_is_found_by_some_run(tmp_path, parts, monkeypatch):
    finish = HashInstaller.finish

    def swapped(self, schedule, **words):
        first, second = (0, 0), (0, 1)
        if first in self._rows and second in self._rows:
            self._rows[first], self._rows[second] = self._rows[second], self._rows[first]
        return finish(self, schedule, **words)

    monkeypatch.setattr(HashInstaller, "finish", swapped)
    monkeypatch.setattr(inbound.Inbound, "probe", _believing)
    with pytest.raises(AssertionError, match="wrong bits"):
        run_all(range(PLANTED_RUNS), tmp_path, parts, enough=1)


async def _believing(self, engine, *, keep=True):
    """A probe that compares nothing."""
    self._first = await engine.call(self._session.decode_next)
