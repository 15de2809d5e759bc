"""``python -m tests.fuzz TARGET CORPUS [libFuzzer flags]``: needs atheris, stops at a finding.

CORPUS is a folder that is made and kept: the next run continues from what this one covered.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvpack", "tests.reference"]):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import NAMES, run

_FLAGS = ["-max_len=4096", "-rss_limit_mb=512", "-timeout=5", "-print_final_stats=1"]


def main() -> None:
    """Seed the corpus and fuzz; does not return."""
    if len(sys.argv) < 3 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python -m tests.fuzz {{{','.join(NAMES)}}} CORPUS [FLAG...]")
    name, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    atheris.Setup(
        [sys.argv[0], *_FLAGS, *sys.argv[3:], str(corpus)], lambda data: run(name, data) and None
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
