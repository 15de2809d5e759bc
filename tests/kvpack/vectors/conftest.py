"""Lets the tests of this folder import ``tests.reference`` and ``tests.vector_kit``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
