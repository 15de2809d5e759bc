"""ls, check, gc, import, export and diff: the store from the command line."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cli_kit import Run, changed, furnish, runner, with_changed_row, write_pack
from pack_kit import HEADER, KEY, LAYOUT, header_for, snapshot

from kvpack.cli import store_commands
from kvpack.cli.progress import Progress
from kvpack.codes import ChunkClass
from kvpack.header import Header
from kvpack.keys import EpochKey, Keyring, write_key_file
from kvpack.layout import Producer
from kvpack.store import check_store, open_store

_KEY = ("--key", "my.key")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path)
    return runner(capsys)


def _import(run: Run, pack: str = "session.kvpack", *options: str) -> str:
    result = run("import", "--json", *_KEY, "--create", *options, pack, "packs")
    assert result.code == 0
    return str(json.loads(result.out)["cut"])


def _objects(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def _chunks() -> list[Path]:
    return sorted(path for path in Path("packs/chunks").rglob("*") if path.is_file())


def test_what_went_in_comes_out_byte_for_byte(run: Run) -> None:
    session = "0123456789abcdef" * 2
    cut = _import(run, "session.kvpack", "--session", session)
    for prefix in (cut, cut[:4], cut[:9].upper()):
        assert run("export", *_KEY, "packs", prefix, f"out{len(prefix)}").code == 0
        assert Path(f"out{len(prefix)}").read_bytes() == Path("session.kvpack").read_bytes()
    (listed,) = _objects(run("ls", "--json", *_KEY, "packs").out)
    assert (listed["cut"], listed["verified"], listed["position"]) == (cut, True, 300)
    assert listed["holds"][0]["session"] == session
    assert listed["holds"][0]["kind"] == "import"

    # Again is the same cut and no further chunk.
    before = _chunks()
    assert _import(run) == cut
    assert _chunks() == before

    assert run("keygen", "--signer", "s").code == 0
    assert run("export", *_KEY, "--signer", "s", "packs", cut[:8], "signed").code == 0
    assert run("verify", "--signer", "s.pub", "signed").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["import", *_KEY, "session.kvpack", "absent"], 1, "absent: No such file"),
        (["import", *_KEY, "session.kvpack", "."], 10, "store"),
        (["import", *_KEY, "--create", "session.kvpack", "."], 10, "an empty folder or a store"),
        (["import", *_KEY, "--create", "bad.kvpack", "packs"], 11, "chunks[0]"),
        (["import", *_KEY, "absent", "packs"], 1, "absent: No such file"),
        (["import", *_KEY, "session.kvpack"], 2, "Missing argument 'STORE'"),
        (["import", "session.kvpack", "packs"], 2, "a key is needed"),
        (["import", *_KEY, "--session", "12", "session.kvpack", "packs"], 2, "32 hex digits"),
        (["import", *_KEY, "--tokens", "t", "session.kvpack", "packs"], 2, "needs --from"),
        (["import", *_KEY, "--from", "mlx-lm", "f", "packs"], 2, "takes no STORE"),
        (["export", *_KEY, "packs", "0000", "out"], 1, "cuts/0000: not in the store"),
        (["export", *_KEY, "packs", "000", "out"], 10, "at least 4 hex digits"),
        (["export", *_KEY, "packs", "../../x", "out"], 10, "at least 4 hex digits"),
        (["export", *_KEY, "packs"], 2, "Missing argument 'CUT' or 'OUT'"),
        (["export", *_KEY, "--to", "mlx-lm", "p", "c"], 2, "takes no CUT"),
        (["export", *_KEY, "--to", "mlx-lm", "p"], 2, "Missing option '--model'"),
        (["export", *_KEY, "--out", "x", "packs", "0000", "out"], 2, "--out needs --to"),
        (["ls", "absent"], 1, "absent: No such file"),
        (["ls", "my.key"], 10, "my.key: header.magic"),
        (["ls", "."], 10, "store"),
        (["ls", *_KEY, "other.kvpack"], 11, "no key for tenant 'acme', epoch 2"),
        (["ls"], 2, "Missing argument"),
        (["check", "packs"], 2, "a key is needed"),
        (["check", *_KEY, "absent"], 1, "absent: No such file"),
        (["check", *_KEY, "session.kvpack"], 1, "Not a directory"),
        (["gc", "absent"], 1, "absent: No such file"),
        (["gc", "--budget", "-1", "packs"], 2, "--budget"),
        (["diff", *_KEY, "session.kvpack"], 2, "Missing argument 'B'"),
        (["diff", "session.kvpack", "session.kvpack"], 2, "a key is needed"),
        (["diff", *_KEY, "session.kvpack", "absent"], 1, "absent: No such file"),
        (["diff", *_KEY, "bad.kvpack", "session.kvpack"], 11, "chunks[0]"),
        (["diff", *_KEY, "session.kvpack", "other.kvpack"], 11, "epoch 2"),
    ],
)
def test_a_failure_has_its_code_one_error_line_and_an_empty_stdout(
    run: Run, arguments: list[str], code: int, says: str
) -> None:
    _import(run)
    # Another content id, or the chunk would not even be opened.
    state = with_changed_row(snapshot(300), 0, 0)
    write_pack("good", state)
    changed("bad.kvpack", "good")
    second = EpochKey("acme", 2, bytes(32))
    write_pack("other.kvpack", key=second, header=Header.of(HEADER.identity, 2))
    result = run(*arguments)
    assert (result.code, result.out) == (code, "")
    first, *others = result.err.splitlines()
    assert first.startswith("kvpack: error: ")
    assert says in first
    assert all(line.startswith("kvpack: hint: ") for line in others)
    assert not Path("out").exists()
    if code != 2:
        (said,) = _objects(run(arguments[0], "--json", *arguments[1:]).out)
        assert (said["ok"], said["exit_code"]) == (False, code)


def test_check_names_every_damage_and_exits_with_13(run: Run) -> None:
    cut = _import(run)
    assert run("check", *_KEY, "--deep", "packs").out == "packs: OK\n"
    (Path("packs") / "stray").write_text("x")
    noted = run("check", *_KEY, "packs")
    assert (noted.code, noted.err) == (0, "")
    assert noted.out == "note: stray: stray (1 bytes that are not the store's)\npacks: OK\n"

    first, second, *_ = _chunks()
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.chmod(0o600)
    first.write_bytes(data)
    second.unlink()
    found = run("check", *_KEY, "packs")
    # What was found is told as it is found, notes too.
    assert (found.code, found.out) == (13, noted.out.splitlines(keepends=True)[0])
    errors = [line for line in found.err.splitlines() if "error" in line]
    assert len(errors) == 2
    assert all(f"needed by cuts/{cut}" in line for line in errors)
    *findings, last = _objects(run("check", *_KEY, "--json", "packs").out)
    assert sorted(one["reason"] for one in findings) == ["not_authentic", "not_stored", "stray"]
    assert last == {"name": "packs", "ok": False, "damage": 2, "notes": 1}
    assert run("export", *_KEY, "packs", cut, "out").code in (1, 11)
    assert not Path("out").exists()

    write_key_file("new.key", EpochKey("acme", 2, bytes(32)))
    foreign = run("check", "--key", "new.key", "packs")
    assert foreign.code == 0
    assert "note: cuts/" in foreign.out and "unknown_key" in foreign.out


def test_check_tells_its_progress_every_byte_of_the_chunks(run: Run) -> None:
    _import(run)
    told: list[int] = []
    assert list(check_store(open_store("packs"), Keyring([KEY]), progress=told.append)) == []
    assert sum(told) == sum(path.stat().st_size for path in _chunks())


def test_gc_shows_its_plan_and_acts_only_when_told(run: Run) -> None:
    _import(run)
    leftover = Path("packs/cuts/.kvpack-00112233445566778899aabbccddeeff.tmp")
    leftover.write_bytes(bytes(100))
    old = time.time() - 7200
    os.utime(leftover, (old, old))
    before = sorted(Path("packs").rglob("*"))
    plan = run("gc", "packs")
    assert plan.code == 0
    assert "remove 1 leftover(s) of crashes, 100 bytes" in plan.out
    assert plan.out.endswith("packs: nothing was changed; --yes does it\n")
    (said,) = _objects(run("gc", "--json", "packs").out)
    assert (said["applied"], len(said["leftovers"]), said["freed_bytes"]) == (None, 1, 100)
    assert sorted(Path("packs").rglob("*")) == before

    (said,) = _objects(run("gc", "--json", "--yes", "packs").out)
    assert said["applied"]["leftovers"] == 1
    assert not leftover.exists()
    assert run("check", *_KEY, "packs").out == "packs: OK\n"

    # A budget that one cut fits drops the older of two, and what is kept is whole.
    write_pack("later", snapshot(310))
    later = _import(run, "later")
    assert run("gc", "--yes", "--budget", "6500", "packs").code == 0
    assert len(_objects(run("ls", "--json", "packs").out)) == 1
    assert run("check", *_KEY, "--deep", "packs").code == 0
    assert later


class _SlowTerminal(io.StringIO):
    """A terminal, and a second that has gone by whenever anybody looks at the clock."""

    def isatty(self) -> bool:
        return True


def test_gc_shows_progress_on_a_terminal_after_a_second(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _import(run)
    chunks = len(_chunks())
    seconds = itertools.count()
    monkeypatch.setattr(
        store_commands,
        "Progress",
        lambda what, total, unit: Progress(what, total, terminal, lambda: next(seconds), unit),
    )
    terminal = _SlowTerminal()
    plan = run("gc", "packs")
    assert plan.err == ""
    said = terminal.getvalue()
    last = max(int(found) for found in re.findall(r"planning: (\d+) objects", said))
    assert last > chunks and said.endswith("\r\x1b[K") and "collecting" not in said
    run("gc", "--yes", "--budget", "0", "packs")
    found = re.findall(r"collecting: (\d+) objects", terminal.getvalue())
    assert max(map(int, found)) > chunks
    assert _chunks() == []


def test_ls_says_what_cannot_be_used(run: Run) -> None:
    cut = _import(run)
    where = Path("packs/cuts") / cut
    data = where.read_bytes()
    where.chmod(0o600)
    where.write_bytes(data[:-1])
    (said,) = _objects(run("ls", "--json", "packs").out)
    assert said["problem"] and not said["verified"]
    where.write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    (said,) = _objects(run("ls", "--json", *_KEY, "packs").out)
    assert said["problem"] and not said["verified"]
    table = run("ls", *_KEY, "packs").out
    assert "not verified" in table.splitlines()[0] and "good" not in table
    assert run("ls", "session.kvpack", "packs").out.count("(not verified: ") == 2


def _compared(run: Run, other: str) -> list[dict[str, object]]:
    result = run("diff", "--json", *_KEY, "session.kvpack", other)
    *found, last = _objects(result.out)
    assert last == {"first": "session.kvpack", "second": other, "same": not found}
    assert result.code == (1 if found else 0)
    return found


def test_diff_finds_every_single_changed_row(run: Run) -> None:
    """One byte anywhere: the row that it is in is named, and nothing else."""
    state = snapshot(300)
    seen = set()
    for number, tile in enumerate(state.tiles):
        spec = tile.spec
        start = 0
        for layer in spec.layers:
            for role, size in (
                ("key", LAYOUT.key_row_bytes(layer)),
                ("value", LAYOUT.value_row_bytes(layer)),
            ):
                for row in {0, spec.token_count // 2, spec.token_count - 1}:
                    name = f"{number}-{layer}-{role}-{row}"
                    write_pack(name, with_changed_row(state, number, start + row * size + 1))
                    assert _compared(run, name) == [
                        {
                            "class": spec.kind.value,
                            "position": spec.first_position + row,
                            "layer": layer,
                            "role": role,
                        }
                    ]
                    seen.add((layer, role))
                start += size * spec.token_count
    assert len(seen) == 6


def test_diff_finds_tokens_fields_and_shows_no_token(run: Run) -> None:
    state = snapshot(300)
    ids = list(state.token_ids)
    ids[77] = 31337
    write_pack("ids", replace(state, token_ids=tuple(ids)))
    (found,) = _compared(run, "ids")
    assert (found["class"], found["position"]) == (ChunkClass.TOKEN_IDS.value, 77)
    assert "31337" not in run("diff", *_KEY, "session.kvpack", "ids").out

    write_pack("hf", replace(state, producer=Producer.TRANSFORMERS))
    assert _compared(run, "hf") == [
        {"field": "producer", "first": "engine", "second": "transformers"}
    ]
    weights = Header.of(replace(HEADER.identity, weights_digest=bytes([9]) * 32), 1)
    write_pack("weights", header=weights)
    (found,) = _compared(run, "weights")
    assert found["field"] == "weights_digest"
    shape = replace(LAYOUT, max_context_tokens=8192)
    write_pack("shape", replace(state, layout=shape), header=header_for(shape))
    (found,) = _compared(run, "shape")
    assert (found["field"], found["first"]) == ("max_context_tokens", "4096")
    layers = replace(LAYOUT, layers=LAYOUT.layers[:2])
    write_pack("layers", snapshot(300, layers), header=header_for(layers))
    (found,) = _compared(run, "layers")
    assert (found["field"], found["first"], found["second"]) == ("layers", "3", "2")
    # Under another root nothing but the epoch differs, and everything is opened to know.
    second = EpochKey("acme", 2, bytes(32))
    write_key_file("next.key", second)
    write_pack("epoch", key=second, header=Header.of(HEADER.identity, 2))
    result = run("diff", *_KEY, "--key", "next.key", "session.kvpack", "epoch")
    assert (result.code, result.out) == (1, "epoch: 1 and 2\n")
    assert KEY.epoch == 1


def test_diff_of_two_cuts_of_one_session_compares_what_both_hold(run: Run) -> None:
    state = snapshot(300)
    shorter = snapshot(290)
    full = [i for i, tile in enumerate(state.tiles) if tile.spec.end_position == 300]
    tiles = tuple(
        replace(tile, data=_head(state, tile.spec, full)) if tile.spec.layers == (1,) else tile
        for tile in shorter.tiles
    )
    write_pack("shorter", replace(shorter, tiles=tiles))
    fields = [one.get("field") for one in _compared(run, "shorter")]
    assert fields == ["position", "schedule[0]"]


def _head(state: object, spec: object, full: list[int]) -> bytes:
    """The rows of ``spec`` as the longer session has them."""
    (tile,) = [
        one for one in state.tiles
        if one.spec.layers == spec.layers and one.spec.first_position == spec.first_position
    ]  # fmt: skip
    (_, keys, values) = next(iter(tile.planes(LAYOUT)))
    count = spec.token_count
    return bytes(keys[: count * 4]) + bytes(values[: count * 6])


def test_of_several_changed_rows_the_first_position_is_named(run: Run) -> None:
    state = snapshot(300)
    number = next(i for i, tile in enumerate(state.tiles) if tile.spec.layers == (0, 2))
    first = state.tiles[number].spec.first_position
    key, value = LAYOUT.key_row_bytes(0), LAYOUT.value_row_bytes(0)
    layer = (key + value) * state.tiles[number].spec.token_count
    both = with_changed_row(with_changed_row(state, number, 3 * key), number, layer + 1 * key)
    write_pack("both", both)
    (found,) = _compared(run, "both")
    assert (found["layer"], found["position"]) == (2, first + 1)

    # Rows of the other class lie before these.
    full = next(i for i, tile in enumerate(state.tiles) if tile.spec.layers == (1,))
    write_pack("three", with_changed_row(both, full, 20 * LAYOUT.key_row_bytes(1)))
    (found,) = _compared(run, "three")
    assert (found["class"], found["layer"], found["position"]) == ("full", 1, 20)
