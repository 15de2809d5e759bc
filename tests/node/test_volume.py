"""A volume that is too slow is found before the node listens."""

from __future__ import annotations

import dataclasses
import os

import pytest
from node_support import run

from node.errors import UsageError, VolumeError
from node.server import running
from node.volume import VolumeBound, durable_reserve, probe_volume


class Disk:
    """A volume whose durable writes take the given times, over and over, on its own clock."""

    def __init__(self, *times_s: float) -> None:
        self.times_s = times_s
        self.now_s = 0.0
        self.writes = 0

    def clock_s(self) -> float:
        return self.now_s

    def reserve(self, folder, name) -> None:
        durable_reserve(folder, name)
        self.now_s += self.times_s[self.writes % len(self.times_s)]
        self.writes += 1


def probe(folder, disk, **bound):
    return probe_volume(folder, VolumeBound(**bound), disk.reserve, disk.clock_s)


def test_twenty_reserves_within_the_bound_are_good(tmp_path):
    disk = Disk(0.005, 0.099)
    assert probe(tmp_path, disk) == pytest.approx(0.099)
    assert disk.writes == 20 and list(tmp_path.iterdir()) == []


def test_a_slow_volume_is_refused_by_name_with_what_was_measured(tmp_path):
    disk = Disk(0.004, 0.008, 0.7)
    with pytest.raises(VolumeError) as refused:
        probe(tmp_path, disk)
    said = str(refused.value)
    assert str(tmp_path) in said and "write 3 took 700 ms, those before at most 8 ms" in said
    assert "at most 100 ms" in said and "--volume-worst" in said
    # Twice three writes, not twice twenty: a slow volume is not made to wait for.
    assert disk.writes == 6 and list(tmp_path.iterdir()) == []
    assert probe(tmp_path, disk, worst_s=0.71) == pytest.approx(0.7)


def test_one_bad_moment_is_forgiven_and_a_second_is_not(tmp_path):
    assert probe(tmp_path, Disk(0.2, *[0.001] * 20)) == pytest.approx(0.001)
    with pytest.raises(VolumeError, match="write 1 took 200 ms; expected"):
        probe(tmp_path, Disk(0.2))


def test_a_volume_that_refuses_writes_says_why(tmp_path):
    def full(folder, name):
        raise OSError(28, os.strerror(28))

    with pytest.raises(VolumeError, match="the disk is full"):
        probe_volume(tmp_path, VolumeBound(), full)
    with pytest.raises(VolumeError, match="the folder does not exist"):
        probe_volume(tmp_path / "gone", VolumeBound())


def test_bounds_outside_their_range_are_usage_errors():
    for values in ({"reserves": 0}, {"reserves": 1001}, {"worst_s": 0.0}, {"worst_s": 61.0}):
        with pytest.raises(UsageError):
            VolumeBound(**values)


def test_a_node_on_a_slow_volume_does_not_start_and_binds_nothing(world, monkeypatch):
    bound = []

    async def start():
        async with running(dataclasses.replace(world.config("source"), volume_worst_s=0.05)):
            raise AssertionError

    slow = Disk(0.06)
    monkeypatch.setattr("node.grpc_side.bind", lambda *_: bound.append(1))
    monkeypatch.setattr(
        "node.server.probe_volume",
        lambda folder, limit: probe_volume(folder, limit, slow.reserve, slow.clock_s),
    )
    with pytest.raises(VolumeError, match="source-data"):
        run(start())
    assert bound == [] and not (world.root / "source-data" / "journal.sqlite").exists()
