"""``python -m tests.reference.verify --key FILE PACK...``: verdicts of the second reader."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from tests.reference.bundle import open_from_footer, verify_forwards
from tests.reference.keys import Roots, load_key_file
from tests.reference.verdict import Refused


def verify(data: bytes, roots: Roots) -> None:
    """Both read orders; they must agree on good and bad.

    Raises:
        Refused: The verdict from the footer.
    """
    found = [_judge(data, roots, forwards) for forwards in (False, True)]
    if (found[0] is None) != (found[1] is None):
        raise Refused("failure", "reference", "the two read orders differ")
    if found[0] is not None:
        raise found[0]


def _judge(data: bytes, roots: Roots, forwards: bool) -> Refused | None:
    try:
        if forwards:
            verify_forwards(io.BytesIO(data), roots).finish()
        else:
            index, plaintexts = open_from_footer(data, roots)
            for _ in plaintexts:
                pass
            index.finish()
    except Refused as refused:
        return refused
    return None


def main() -> int:
    """The command; the exit code is the worst that section 12 gives."""
    parser = argparse.ArgumentParser(description="Judge packs by the specification alone.")
    parser.add_argument("--key", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("packs", type=Path, nargs="+", metavar="PACK")
    arguments = parser.parse_args()
    worst = 0
    for path in arguments.packs:
        try:
            roots: Roots = {}
            for key in arguments.key:
                roots |= load_key_file(key)
            verify(path.read_bytes(), roots)
            print(f"{path}: OK")
        except Refused as refused:
            print(f"{path}: FAILED ({refused.reason})")
            print(f"reference: error: {path}: {refused}", file=sys.stderr)
            worst = max(worst, refused.exit_code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
