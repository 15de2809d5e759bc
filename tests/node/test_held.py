"""What a node offers as held is read from files that must be let go of exactly once."""

from __future__ import annotations

import os

from node.migration.held import HeldFile


def test_closing_a_held_file_twice_does_not_close_a_file_that_came_after(tmp_path):
    left = tmp_path / "left"
    left.write_bytes(b"")
    held = HeldFile(left, 0)
    held.close()
    # The number of the closed descriptor goes to whoever opens a file next.
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        held.close()
        assert os.fstat(other)
        assert held.read(bytes(32)) is None and held.seal_ids() == []
    finally:
        os.close(other)
