"""``python -m bench.format``: speed and memory of the pack format, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.format.memory import CASES, ZSTD_CASES, MemoryRow, peak_mib
from bench.format.pack import make_pack
from bench.format.restore import restore_rows
from bench.format.speed import speed_rows
from bench.format.turns import Row
from bench.format.write import write_rows
from kvpack.chunk import Codec

PARTS = ("verify", "write", "restore", "memory")


@contextmanager
def loaded(path: Path) -> Iterator[memoryview]:
    """The file in memory, from the beginning of a page on."""
    length = path.stat().st_size
    pages = mmap.mmap(-1, length)
    with path.open("rb", buffering=0) as file, memoryview(pages) as view:
        filled = 0
        while filled < length:
            filled += file.readinto(view[filled:])
        yield view


def memory_rows(path: Path, mib: int) -> list[MemoryRow]:
    """Every case on the pack and on one of an eighth of its size."""
    small = make_pack(path.with_name("small"), max(1, mib // 8))
    zstd = make_pack(path.with_name("zstd"), max(1, mib // 4), Codec.ZSTD_SPLIT)
    rows = []
    for case in CASES:
        for pack, size in ((small, mib // 8), (path, mib)):
            rows.append(MemoryRow(case, size, peak_mib(case, pack)))
    rows += [MemoryRow(f"{case}, zstd", mib // 4, peak_mib(case, zstd)) for case in ZSTD_CASES]
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.format", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--mib", type=int, default=512, help="size of the pack")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where packs are written; default: temporary")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = options.only or list(PARTS)
    rows: list[Row] = []
    memory: list[MemoryRow] = []
    note, load = "", os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = make_pack(Path(folder) / "pack", options.mib)
        with loaded(path) as data:
            if "verify" in parts:
                rows += speed_rows(path, data, options.rounds)
            if "restore" in parts:
                rows += restore_rows(path, data, options.rounds)
            if "write" in parts:
                written = write_rows(path, data, options.mib, options.rounds)
                note, rows = (written, rows) if isinstance(written, str) else ("", rows + written)
        if "memory" in parts:
            memory = memory_rows(path, options.mib)
    print(
        f"load of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after", file=sys.stderr
    )
    _print(rows, memory, note, as_json=options.json)


def _print(rows: list[Row], memory: list[MemoryRow], note: str, *, as_json: bool) -> None:
    if as_json:
        found = {
            "speed": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows],
            "memory": [dataclasses.asdict(row) for row in memory],
            "note": note,
        }
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
        return
    if rows:
        print("| what | against | ratio, median | quickest | CPU | GB/s | wanted | |")
        print("| --- | --- | ---: | ---: | ---: | ---: | --- | --- |")
    for row in rows:
        print(row.markdown())
    if note:
        print(note)
    if memory:
        print("\n| memory | pack, MiB | peak above import, MiB | wanted | |")
        print("| --- | ---: | ---: | --- | --- |")
    for line in memory:
        print(line.markdown())


if __name__ == "__main__":
    main()
