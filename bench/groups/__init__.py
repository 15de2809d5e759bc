"""Who takes turns with whom. One module each: ``turns(order)`` gives the turns of a round."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

#: In the order in which they run: seconds each may take, payloads and all rounds together.
GROUPS = {
    "move": 400.0,
    "move_518": 105.0,
    "network": 290.0,
    "link": 185.0,
    "memory": 115.0,
    "disk": 105.0,
    "lookup": 35.0,
    "engine": 105.0,
    "growth": 165.0,
}

#: Only where they are asked for.
SLOW_GROUPS = {"lookup_slow": 220.0, "sessions": 300.0, "llama": 60.0}


@dataclass(frozen=True)
class Order:
    """What a group is to do.

    Attributes:
        folder: Its files.
        tokens: Of the usual cache: 517,983,232 bytes where nothing else is asked for.
        large_tokens: Of the headline's: 1,823,184,896 bytes.
        rounds: How many, where time is left.
        quick: Whether only a look is wanted: nothing that takes long whatever the size.
        limit_s: What all of it may take.
        kept: What has to stay until the last round is over.
    """

    folder: Path
    tokens: int
    large_tokens: int
    rounds: int
    quick: bool
    limit_s: float
    kept: contextlib.ExitStack
