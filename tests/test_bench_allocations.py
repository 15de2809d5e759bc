"""What a process held is written down by itself, and drawn without a path of its machine."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.allocations import Sample, draw, samples, without

ROOT = Path(__file__).parents[1]


def test_large_pieces_of_a_process_are_drawn_by_who_asked_for_them(tmp_path: Path) -> None:
    """A child that holds 8 MiB and lets go of it."""
    work = (
        # What a process begins with is not followed.
        "import time; time.sleep(1.0); held = bytearray(8 << 20); time.sleep(0.8); del held; "
        "time.sleep(0.5); small = [bytes(100) for _ in range(100)]"
    )
    tracing = str(ROOT / "bench/tracing")
    environment = {**os.environ, "KVPACK_ALLOCATIONS": str(tmp_path), "PYTHONPATH": tracing}
    subprocess.run([sys.executable, "-c", work], env=environment, check=True, timeout=60)
    (file,) = tmp_path.iterdir()
    found = samples(file.read_text().splitlines(keepends=True))
    held = [sum(sample.held.values()) >> 20 for sample in found]
    assert max(held) == 8 and held[-1] == 0
    assert max(sample.resident for sample in found) > 8 << 20
    picture = draw("a <title>", found)
    words = [one.text or "" for one in ElementTree.fromstring(picture).iter() if one.text]  # noqa: S314
    assert "a <title>" in words and any(word.endswith("8.0 MiB at most") for word in words)
    assert str(tmp_path) not in picture and str(ROOT) not in picture
    assert len(picture) < 150_000


def test_a_last_line_that_is_cut_short_is_left_out() -> None:
    whole = '{"s": 1, "resident": 5, "held": {"a": 1}}\n'
    assert len(samples(['{"command": ["python"]}\n', whole, whole[:20]])) == 1


def test_what_is_left_out_is_in_no_area_and_in_no_line() -> None:
    taken = [
        Sample(at, 9 << 20, {"a.py:1": 5 << 20, "a.py:2": 1 << 20, "b.py:7": 2 << 20})
        for at in (0, 1)
    ]
    assert without(taken[0], ["a.py"]).held == {"b.py:7": 2 << 20}
    picture = draw("t", [without(one, ["a.py:1"]) for one in taken])
    assert "a.py:1" not in picture and "a.py:2" in picture and "resident" not in picture
    assert "resident" in draw("t", [without(one, []) for one in taken])
