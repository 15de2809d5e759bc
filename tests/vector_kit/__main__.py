"""``python -m tests.vector_kit FOLDER``: writes every vector."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.vector_kit.cases import VECTORS

if __name__ == "__main__":
    for vector in VECTORS:
        (Path(sys.argv[1]) / vector.name).write_bytes(vector.encode())
    print(f"{len(VECTORS)} vectors")
