"""``python -m bench``: its verdicts, its tables, two rows for real, and an end in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from bench import link, machine
from bench.__main__ import ended
from bench.growth import Series, series_of
from bench.machine import descendants
from bench.measured import (
    FAILED,
    NOT_INSTALLED,
    TIMED_OUT,
    Contender,
    Sample,
    Spread,
    speed_ratios,
)
from bench.peers.pair import require_installed
from bench.table import BEGIN, END, as_page, judged, put_between
from bench.turns import NoFigureError, Turn, take_turns
from bench.verdict import MET, NOT_DECIDED, NOT_MET, verdict
from bench.wanted import WANTED, Kind, Wanted

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--tokens", "400", "--rounds", "2", "--only", "network:sockets_tls"]


@pytest.mark.parametrize(
    ("values", "bound", "at_least", "alien", "word"),
    [
        ([4.1, 4.2, 5.0], 4.0, True, None, MET),
        ([4.0, 4.0, 4.0], 4.0, True, 0.0, MET),
        ([3.9, 3.8, 3.0], 4.0, True, 0.0, NOT_MET),
        ([1.9, 1.8, 1.0], 2.0, False, 0.0, MET),
        ([2.1, 2.2, 2.3], 2.0, False, 0.0, NOT_MET),
        # Two rounds, or a busy machine, decide nothing: neither a win nor a loss.
        ([9.0, 9.0], 4.0, True, 0.0, NOT_DECIDED),
        ([9.0, 9.0, 9.0], 4.0, True, 0.26, NOT_DECIDED),
        ([1.0, 1.0, 1.0], 4.0, True, 1.8, NOT_DECIDED),
        # On both sides: three of four have to agree, within a narrow range.
        ([3.9, 4.1, 4.2], 4.0, True, 0.0, NOT_DECIDED),
        ([3.9, 4.1, 4.2, 4.2], 4.0, True, 0.0, MET),
        ([3.9, 4.1, 4.2, 9.0], 4.0, True, 0.0, NOT_DECIDED),
        ([4.1, 3.9, 3.8, 3.8], 4.0, True, 0.0, NOT_MET),
        ([], 4.0, True, 0.0, NOT_DECIDED),
    ],
)
def test_a_verdict_follows_from_the_rounds_and_from_how_quiet_it_was(
    values, bound, at_least, alien, word
):
    assert verdict(values, bound, at_least=at_least, alien=alien) == word


def _contender(name, seconds, **more):
    samples = [Sample(s, 1000, round=i, alien_cores=0.0) for i, s in enumerate(seconds)]
    return Contender(name, name, "g", samples=samples, **more)


def test_ratios_are_of_the_same_round_and_of_others_one_after_another():
    ours, a, b = (_contender(n, s) for n, s in (("x", [1, 2]), ("a", [1, 1]), ("b", [3, 1, 9])))
    assert speed_ratios(ours, [a, b]) == [4.0, 1.0]
    a.samples.pop(0)
    assert speed_ratios(ours, [a]) == [0.5]
    assert Spread.of([]) is None


def test_a_row_says_why_it_has_no_figure():
    row = Wanted("w", "g", "x", ("a",), Kind.SPEED, 2.0, 4.0)
    ours, other = _contender("x", [1, 1, 1]), _contender("a", [3, 3, 3])
    assert judged(row, {}) == ("", "not run", "")
    assert judged(row, {"g": {"a": other}}) == ("", "not there yet", "")
    found, word, aim = judged(row, {"g": {"a": other, "x": ours}})
    assert (word, aim) == (MET, NOT_MET) and found.startswith("3.00 (3.00 to 3.00), n=3")
    other.status, other.reason = NOT_INSTALLED, "no a"
    assert judged(row, {"g": {"a": other, "x": ours}}) == ("", "a: not installed: no a", "")


def test_a_row_that_compares_a_sample_with_itself_has_no_verdict():
    """Where the rule is off, what it chose is the raw run: 1.0 on any machine."""
    row = Wanted("w", "g", "x", ("a",), Kind.SPEED, 1.0, 1.0)
    ours, other = _contender("x", [1, 2, 1], against="a"), _contender("a", [1, 2, 1])
    assert judged(row, {"g": {"a": other, "x": ours}}) == ("off by rule: the same", "", "")
    page = _page([other, ours])
    assert "| off by rule: the same |" in page and "1.00 (1.00" not in page
    ours.samples[2] = Sample(0.9, 1000, round=2, alien_cores=0.0)
    assert judged(row, {"g": {"a": other, "x": ours}})[1] == MET


def _page(contenders):
    """The tables of a run of one group."""
    told = ("cpu", "cores", "system", "python", "openssl", "tcp_congestion_control")
    group = {"seconds": 1.0, "load_before": 0.0, "load_after": 0.0, "status": "", "reason": ""}
    return as_page({
        "machine": {**dict.fromkeys(told, ""), "memory_bytes": 0, "versions": {}},
        "quick": False, "began": "", "seconds": 1.0,
        "groups": {"g": {**group, "contenders": [one.as_json() for one in contenders]}},
    })  # fmt: skip


def test_a_table_says_over_how_many_rounds_each_figure_is():
    ours, other = _contender("x", [2.0], against="a"), _contender("a", [1.0, 3.0, 2.0])
    lines = [line.split(" | ") for line in _page([other, ours]).splitlines()]
    cells = {line[0]: line[2:] for line in lines}
    assert cells["| a"][0] == "2.000 (1.000 to 3.000), n=3"
    # One round has no range, and the ratio is of the one that both had.
    assert (cells["| x"][0], cells["| x"][3]) == ("2.000, n=1", "0.50, n=1")
    assert "in which all of a table took turns" not in _page([other])


def test_the_rows_that_are_wanted_can_all_be_told_apart():
    assert len({(row.group, row.ours, row.against, row.kind) for row in WANTED}) == len(WANTED)
    assert all(row.aim is None or (row.aim > row.must) == row.kind.at_least for row in WANTED)


def test_who_fails_is_reported_and_the_others_go_on():
    good, bad = Contender("good", "good", "g"), Contender("bad", "bad", "g")
    calls = []

    def sometimes():
        calls.append(1)
        if len(calls) == 2:
            raise OSError("it is gone")
        return {"bad": Sample(1.0, 1)}

    turns = [Turn([bad], sometimes), Turn([good], lambda: {"good": Sample(1.0, 1)})]
    take_turns(turns, 4, time.monotonic() + 60)
    assert (bad.status, bad.reason, bad.samples) == (FAILED, "OSError: it is gone", [])
    assert [sample.round for sample in good.samples] == [0, 1, 2, 3] and len(calls) == 2


@pytest.mark.parametrize(("name", "value"), [("_PROVIDE_S", 0.0), ("_FREE_PAGES", "SC_NOTHING")])
def test_memory_that_cannot_be_provided_is_no_fault_of_a_contender(monkeypatch, name, value):
    """In no time, or where the system does not say what is free."""
    monkeypatch.setattr(machine, name, value)
    ours = Contender("x", "x", "g")
    provide = partial(machine.provide_memory, 1)
    turn = Turn([ours], lambda: {"x": Sample(1.0, 1)}, provide)
    take_turns([turn], 2, time.monotonic() + 60)
    assert (ours.status, len(ours.samples)) == ("measured", 2), ours.reason


class _Clock:
    """Seconds that pass where somebody says so."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def turn(self, name, seconds, **more):
        contender = Contender(name, name, "g")

        def once():
            self.now_s += seconds
            return {name: Sample(seconds, 1)}

        return Turn([contender], once, **more)


def _rounds(turns, rounds, limit_s, clock):
    take_turns(turns, rounds, clock.now_s + limit_s, clock=clock)
    return [[sample.round for sample in turn.contenders[0].samples] for turn in turns]


def test_a_round_is_begun_where_a_whole_one_fits():
    clock = _Clock()
    turns = [clock.turn("a", 6.0), clock.turn("b", 4.0), clock.turn("c", 1.0, rounds_max=1)]
    assert _rounds(turns, 9, 52.0, clock) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0]]
    assert clock.now_s == 151.0


def test_who_does_not_fit_is_left_out_and_what_was_measured_stays():
    clock = _Clock()
    turns = [clock.turn("a", 6.0, warm_ups=1), clock.turn("b", 30.0), clock.turn("c", 1.0)]
    assert _rounds(turns, 3, 60.0, clock) == [[0, 1, 2], [0], [0, 1, 2]]
    assert clock.now_s <= 160.0 and turns[1].contenders[0].status == "measured"
    late = [clock.turn("a", 9.0), clock.turn("b", 1.0)]
    assert _rounds(late, 3, 5.0, clock) == [[0], []]
    assert late[1].contenders[0].status == TIMED_OUT
    assert late[1].contenders[0].reason == "no time was left for it"


def test_something_with_rounds_of_its_own_gives_them_all_at_once():
    ours = Contender("x", "x", "g")
    samples = [Sample(1.0, 0, round=7), Sample(2.0, 0, round=8)]
    take_turns([Turn([ours], lambda: {"x": samples}, rounds_max=1)], 5, time.monotonic() + 60)
    assert [(one.round, one.seconds) for one in ours.samples] == [(7, 1.0), (8, 2.0)]
    assert all(one.alien_cores is not None for one in ours.samples) == Path("/proc").is_dir()


def test_a_group_that_is_ended_keeps_what_it_has(tmp_path):
    result = tmp_path / "result.json"
    assert ended(result, 9.0) == (TIMED_OUT, "not done in 9 s")
    for rounds, status in ((2, TIMED_OUT), (3, "measured")):
        result.write_text(json.dumps([{"samples": []}, {"samples": [{}] * rounds}]))
        found, reason = ended(result, 9.0)
        assert found == status and reason.startswith("not done in 9 s")


def test_no_link_means_no_figure(monkeypatch):
    monkeypatch.setattr(link.shutil, "which", lambda tool, path: None)
    with pytest.raises(NoFigureError, match="unshare") as raised:
        link.behind(1.0)
    assert raised.value.status == NOT_INSTALLED


def test_what_cannot_be_imported_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "zmq.py").write_text("raise ImportError('libsodium is missing')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NoFigureError, match="libsodium is missing") as raised:
        require_installed("zeromq")
    assert raised.value.status == NOT_INSTALLED


def test_growth_is_read_off_names_and_sizes():
    found = series_of(
        _contender(f"context_{size}_move", [cost])
        for size, cost in ((10, 1), (100, 10), (1000, 300))
    )
    assert [(one.axis, one.name) for one in found] == [("tokens", "move")]
    assert found[0].word == "worse than linear" and round(found[0].steepest, 2) == 1.48
    assert Series("chunks", "hit", ((10, 1.0), (1000, 1.0))).word == "at most linear"
    lookups = series_of([_contender("lookup_miss_10", [1]), _contender("lookup_miss_99", [2])])
    assert [(one.axis, one.name) for one in lookups] == [("chunks", "miss")]


def test_a_table_is_put_between_its_markers_and_nowhere_else():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_between(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for wrong in ("", f"{END}\n{BEGIN}\n", page + page):
        with pytest.raises(ValueError, match="expected one line"):
            put_between(wrong, "new")


def _bench(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "bench", "--folder", str(folder), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def test_two_rows_for_real(tmp_path):
    """Received bytes are compared; what was not asked for is not run."""
    folder, out = tmp_path / "work", tmp_path / "out.json"
    folder.mkdir()
    process = _bench(folder, *SMALL, "--out", str(out))
    page, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = json.loads(out.read_text())
    contenders = {one["name"]: one for one in found["groups"]["network"]["contenders"]}
    assert list(contenders) == ["sockets_tcp", "sockets_tls"]
    for one in contenders.values():
        assert one["status"] == "measured" and len(one["samples"]) == 2, one
        assert all(sample["byte_count"] == 399 * 53_248 for sample in one["samples"])
        assert all(sample["cpu_s"] > 0 for sample in one["samples"])
    assert found["machine"]["cpu"] and found["machine"]["versions"]["cryptography"]
    assert as_page(found) in page and "| raw TCP | nothing |" in page
    assert list(folder.iterdir()) == [] and sorted(tmp_path.iterdir()) == [out, folder]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_no_file(tmp_path, number):
    folder, out = tmp_path / "work", tmp_path / "out.json"
    folder.mkdir()
    rounds = ["--tokens", "400", "--rounds", "900", "--only", "network:sockets_tls"]
    process = _bench(folder, *rounds, "--out", str(out))
    try:
        # Until an end of a transfer, which is a grandchild, is there.
        _wait_for(lambda: len(descendants(process.pid)) >= 2)
        family = descendants(process.pid)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.endswith("bench: error: interrupted: no result was written\n")
    assert list(folder.iterdir()) == [] and list(tmp_path.iterdir()) == [folder]
    assert [pid for pid in family if _is_ours(pid)] == []


def _is_ours(pid):
    """Whether it is still a process of this bench: its number may have gone to another one."""
    try:
        return b"bench." in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _wait_for(condition, within_s=60.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "nothing"], "--only nothing"),
        (["--rounds", "0"], "--rounds"),
        (["--folder", "/nowhere"], "--folder"),
        (["--out", "/nowhere/out.json"], "--out"),
        (["--resume"], "--resume"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(arguments, named):
    ran = subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("bench: error: ") and named in ran.stderr
