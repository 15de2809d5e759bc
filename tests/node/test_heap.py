"""Memory that a node's streams use: in large pages, and none before it is used."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from node.config import child_environment

ROOT = Path(__file__).resolve().parents[2]
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

#: Blocks as a stream has them, before and after; what the system says of the pages they lie in.
_BLOCKS = """
import json, re, sys
from pathlib import Path
from node.config import tune_malloc, widen_heap

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def flagged(block):
    at, area = id(block), 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            area = int(found[1], 16) <= at < int(found[2], 16)
        elif area and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False

tune_malloc()
before = flagged(b"\\1" * (2 << 20))
rss = resident()
for _ in range(3):
    widen_heap()
taken = resident() - rss
blocks = [b"\\1" * (2 << 20) for _ in range(32)]
print(json.dumps([before, sum(map(flagged, blocks)), taken]))
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not LARGE_PAGES.exists(),
    reason="needs glibc and a system with large pages",
)
def test_what_a_heap_grows_by_lies_in_large_pages_and_costs_nothing_before():
    ran = subprocess.run(
        [sys.executable, "-c", _BLOCKS],
        env=child_environment(ROOT),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, after, taken_bytes = json.loads(ran.stdout)
    # The first may begin on a small page, and one may have found room in the heap as it was.
    assert not before
    assert after >= 30
    assert taken_bytes < 8 << 20
