"""Who takes turns with whom. One module each: ``turns(order)`` gives the turns of a round."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

#: In the order in which they run: seconds each may take, all its rounds together.
GROUPS = {
    "move": 330.0,
    "network": 240.0,
    "memory": 120.0,
    "disk": 90.0,
    "lookup": 120.0,
    "engine": 120.0,
    "growth": 180.0,
}

#: Only where they are asked for.
SLOW_GROUPS = {"sessions": 300.0, "llama": 120.0}


@dataclass(frozen=True)
class Order:
    """What a group is to do.

    Attributes:
        folder: Its files.
        tokens: Of the usual cache: 517,983,232 bytes where nothing else is asked for.
        large_tokens: Of the headline's: 1,823,184,896 bytes.
        rounds: How many, where time is left.
        quick: Whether only a look is wanted: nothing that takes long whatever the size.
        slow: Whether what takes long is wanted, too.
        kept: What has to stay until the last round is over.
    """

    folder: Path
    tokens: int
    large_tokens: int
    rounds: int
    quick: bool
    slow: bool
    kept: contextlib.ExitStack
