"""A volume that is too slow is found before the node listens."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys

import pytest
from node_support import run

from node.config import Address
from node.errors import FolderInUseError, UsageError, VolumeError
from node.http.options import HttpOptions
from node.server import running
from node.volume import (
    LOCK,
    VolumeBound,
    durable_reserve,
    held_alone,
    probe_volume,
    volume_bound,
)


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
    assert "at most 100 ms" in said and "--volume-worst 1.4" in said
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


def test_a_node_that_nobody_moves_sessions_to_answers_on_a_slow_volume_too(world, tmp_path):
    served = world.config("source")
    alone = dataclasses.replace(
        served,
        address=None,
        volume_worst_s=0.1,
        http=HttpOptions(Address("127.0.0.1", 0)),
    )
    disk = Disk(0.5)
    assert probe_volume(tmp_path, volume_bound(alone), disk.reserve, disk.clock_s) == 0.5
    assert volume_bound(served).worst_s == served.volume_worst_s


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


def test_a_second_node_on_one_data_folder_does_not_start_and_the_first_serves_on(world):
    async def work():
        async with world.node("source") as (node, _):
            with pytest.raises(FolderInUseError, match="source-data: another node process"):
                async with running(world.config("source")):
                    raise AssertionError
            # It did not take this one's lease on its way.
            await node.sessions.lease.renew()
            await node.sessions.open("one")
        async with world.node("source"):
            pass

    run(work())


def test_a_data_folder_is_free_again_with_the_death_of_its_process(tmp_path):
    code = (
        "import pathlib, sys, time; from node.volume import held_alone\n"
        "with held_alone(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError), held_alone(tmp_path):
            raise AssertionError
        process.kill()
    with held_alone(tmp_path):
        assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_locked_is_a_clear_refusal(tmp_path):
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VolumeError, match="no durable write"), held_alone(tmp_path):
        raise AssertionError
    assert not (tmp_path / "elsewhere").exists()
