"""What a check remembers on the way: tables in a temporary file, and a volume that has no room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import KEY, Session, import_path, new_store, save, token_ids

from kvpack.keys import write_key_file
from kvpack.store import ObjectData, names
from kvpack.store.seen import IdTables, Table


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A volume of a few pages."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a volume")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


SMALL = """
import sys
from kvpack.store import seen
seen._CACHE_KIB = 16
from kvpack.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_check_on_a_full_volume_ends_with_one_line(full: Path, tmp_path: Path) -> None:
    store = new_store(tmp_path)
    save(store, Session(token_ids(300)), 300)
    nodes = (names.node_name(number.to_bytes(32, "big"), bytes(32)) for number in range(1500))
    store.put_if_absent([ObjectData(name, b"") for name in nodes])
    key = tmp_path / "key"
    write_key_file(key, KEY)
    # SQLite reads its environment when it is loaded, so this needs a process of its own.
    ran = subprocess.run(
        [sys.executable, "-c", SMALL, "check", "--key", str(key), str(tmp_path / "store")],
        env={**os.environ, "TMPDIR": str(full), "PYTHONPATH": import_path()},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert f"{full}: no room left" in ran.stderr and "TMPDIR" in ran.stderr


def test_a_table_says_which_error_its_volume_has() -> None:
    with IdTables() as tables, pytest.raises(OSError, match=r"interrupted.*TMPDIR"):
        tables._database.set_progress_handler(lambda: 1, 1)
        tables.add_all(Table.CUTS, [bytes(32)])
