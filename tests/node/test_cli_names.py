"""Names that no file can have, given to ``kvnode``: one line, and no traceback."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from node.cli import main

LONG = "h" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--model", LONG],
        ["prove", "--quick", "--model", LONG],
        ["enroll", "--authority", LONG, "--credentials", "x", "--name", "a"],
    ],
)
def test_a_name_that_is_too_long_is_one_line(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 1 and isinstance(ran.exception, SystemExit), ran.exception
    (line,) = ran.stderr.splitlines()
    assert line == f"kvnode: error: {LONG[:120]}: File name too long"
