"""import and export with --compression: what is asked for, and nothing where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli_kit import Run, runner, write_pack
from pack_kit import KEY, snapshot

from kvpack.cli import options
from kvpack.keys import write_key_file
from kvpack.snapshot import Tile


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


def _packed(folder: Path) -> tuple[str, Path]:
    key = folder / "my.key"
    write_key_file(key, KEY)
    value = snapshot(600)
    tiles = tuple(Tile(tile.spec, bytes(len(tile.data))) for tile in value.tiles)
    return str(key), write_pack(folder / "a.kvpack", replace(value, tiles=tiles))


def _stored_bytes(store: Path) -> int:
    chunks = store / "chunks"
    return sum(path.stat().st_size for path in chunks.rglob("*") if path.is_file())


def test_a_store_takes_what_is_asked_for(run: Run, tmp_path: Path) -> None:
    key, pack = _packed(tmp_path)
    sizes = {}
    for word in ("as-is", "off", "on"):
        store = tmp_path / word
        more = () if word == "as-is" else ("--compression", word)
        made = run("import", "--key", key, "--create", *more, "--json", str(pack), str(store))
        assert made.code == 0, made.err
        sizes[word] = _stored_bytes(store)
        assert run("check", "--key", key, "--deep", str(store)).code == 0
    assert sizes["as-is"] == sizes["off"] > 2 * sizes["on"]


def test_an_export_takes_what_is_asked_for(run: Run, tmp_path: Path) -> None:
    key, pack = _packed(tmp_path)
    store = str(tmp_path / "store")
    made = run("import", "--key", key, "--create", "--json", str(pack), store)
    cut = made.out.split('"cut":')[1].split('"')[1]
    for word in ("off", "on"):
        out = tmp_path / f"{word}.kvpack"
        done = run("export", "--key", key, "--compression", word, store, cut[:16], str(out))
        assert done.code == 0, done.err
        assert run("verify", "--key", key, "--deep", str(out)).code == 0
    assert (tmp_path / "off.kvpack").read_bytes() == pack.read_bytes()
    assert (tmp_path / "on.kvpack").stat().st_size < pack.stat().st_size


@pytest.mark.parametrize(("rate", "smaller"), [(10**9, True), (10**11, False)])
def test_auto_asks_the_medium(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int, smaller: bool
) -> None:
    key, pack = _packed(tmp_path)
    asked: list[str] = []

    def measure(folder: str, clock: object) -> int:
        asked.append(folder)
        return rate

    monkeypatch.setattr(options, "measure_write_bits_per_s", measure)
    store = tmp_path / "store"
    more = ("--compression", "auto", str(pack), str(store))
    assert run("import", "--key", key, "--create", *more).code == 0
    assert asked == [str(store)]
    assert (_stored_bytes(store) < pack.stat().st_size / 2) == smaller


def test_another_word_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    key, pack = _packed(tmp_path)
    store = str(tmp_path / "store")
    bad = run("import", "--key", key, "--create", "--compression", "9", str(pack), store)
    assert bad.code == 2
    assert bad.out == ""
