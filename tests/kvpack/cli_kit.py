"""Calls of the kvpack command inside this process, in a folder with keys and packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pack_kit import HEADER, KEY, NUMERICS, schedule, snapshot

from kvpack.bundle import publish_new, write_snapshot
from kvpack.cli import main
from kvpack.header import Header
from kvpack.identity import NumericsFingerprint
from kvpack.keys import EpochKey, write_key_file
from kvpack.snapshot import SessionCacheSnapshot


@dataclass(frozen=True)
class Result:
    """What one call answered."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(list(arguments))
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Result(code, said.out, said.err)

    return run


def write_pack(
    path: Path | str,
    state: SessionCacheSnapshot | None = None,
    *,
    key: EpochKey = KEY,
    header: Header = HEADER,
    numerics: NumericsFingerprint = NUMERICS,
) -> Path:
    state = snapshot(300) if state is None else state
    with publish_new(path) as file:
        write_snapshot(file, key, header, state, numerics, schedule(state.position))
    return Path(path)


def changed(path: Path | str, source: Path | str, offset: int = 600) -> Path:
    """A copy of ``source`` with one bit of one byte changed."""
    data = bytearray(Path(source).read_bytes())
    data[offset] ^= 1
    Path(path).write_bytes(data)
    return Path(path)


def with_changed_row(state: SessionCacheSnapshot, number: int, offset: int) -> SessionCacheSnapshot:
    """``state`` with one byte of one tile changed."""
    tiles = list(state.tiles)
    data = bytearray(tiles[number].data)
    data[offset] ^= 1
    tiles[number] = replace(tiles[number], data=bytes(data))
    return replace(state, tiles=tuple(tiles))


def furnish(folder: Path) -> None:
    """``my.key`` and ``session.kvpack``, as every example has them."""
    write_key_file(folder / "my.key", KEY)
    write_pack(folder / "session.kvpack")
