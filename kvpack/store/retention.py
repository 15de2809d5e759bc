"""Where a session is cut, which cuts keep their windows, and who goes first when room is short.

Pure functions. A ring cannot be rewound to a place that was never cut, and a cut whose window was
collected cannot be restored; so these rules decide what can be reused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from kvpack import limits
from kvpack.layout import CacheLayout
from kvpack.store.names import Hold, HoldKind

#: Cuts are at most this far apart: what is computed again after a loss.
CADENCE_TOKENS_MAX: Final = 2048

#: Cuts are at least this many windows apart, else windows would outweigh everything else.
CADENCE_WINDOWS: Final = 4

#: Prefill edges lie on this grid; a cut elsewhere would need a call of its own.
PREFILL_TOKENS: Final = 512

#: How many turn ends keep their windows: an edit reaches back a few turns at most.
TURNS_KEPT: Final = 4


def cut_cadence_tokens(layout: CacheLayout, prefill_tokens: int = PREFILL_TOKENS) -> int:
    """Distance between two cuts of a growing session, in tokens.

    ``min(2048, 4 windows)``, with the smallest window, rounded up to the prefill grid and to the
    chunk grid. A model without windows has nothing to lose but the last tokens.
    """
    limits.check_range("prefill_tokens", prefill_tokens, 1, limits.POSITION_MAX, "tokens")
    windows = [layer.window_tokens for layer in layout.layers if layer.window_tokens is not None]
    wanted = min([CADENCE_TOKENS_MAX, *(CADENCE_WINDOWS * window for window in windows)])
    grid = math.lcm(prefill_tokens, limits.GRID_TOKENS)
    return -(-wanted // grid) * grid


def cut_positions(first: int, end: int, cadence_tokens: int) -> range:
    """Positions in ``(first, end]`` at which a session that grows from ``first`` is cut."""
    return range((first // cadence_tokens + 1) * cadence_tokens, end + 1, cadence_tokens)


def is_power_of_two_cut(position: int, cadence_tokens: int) -> bool:
    """Whether ``position`` is ``cadence_tokens`` times 1, 2, 4, 8, …

    These few cuts serve prompts that leave a long session early; they cost one window for each
    doubling.
    """
    steps, rest = divmod(position, cadence_tokens)
    return steps > 0 and rest == 0 and steps & (steps - 1) == 0


def retained(
    holds: Iterable[Hold], cadence_tokens: int, turns_kept: int = TURNS_KEPT
) -> frozenset[Hold]:
    """Which holds of one lineage stay: the newest cut, the last turn ends, the power-of-two cuts.

    Imports stay until room is short: somebody asked for them. A session that was moved here stays.
    Of several other holds on one cut the last stands for all.

    Args:
        holds: All holds of one session.
        cadence_tokens: Of the session's layout.
        turns_kept: How many turn ends.
    """
    latest: dict[tuple[int, bytes], Hold] = {}
    every = sorted(holds, key=_age)
    moved = frozenset(hold for hold in every if hold.kind is HoldKind.MOVED)
    for hold in (hold for hold in every if hold not in moved):
        earlier = latest.get((hold.position, hold.cut_id))
        if earlier is None or _rank(hold) >= _rank(earlier):
            latest[hold.position, hold.cut_id] = hold
    ordered = sorted(latest.values(), key=lambda hold: (hold.position, hold.stamp))
    turns = [hold for hold in ordered if hold.kind is HoldKind.TURN]
    keep = {*ordered[-1:], *turns[len(turns) - min(turns_kept, len(turns)) :]}
    keep |= {hold for hold in ordered if is_power_of_two_cut(hold.position, cadence_tokens)}
    keep |= {hold for hold in ordered if hold.kind is HoldKind.IMPORT}
    return moved | keep


def eviction_order(holds: Iterable[Hold]) -> Sequence[Hold]:
    """Who goes first when room is short: what was made or used longest ago.

    A session that was moved here goes never: it is nowhere else.

    Among holds of one moment the shallower goes first: the deeper cut holds all of its rows but a
    window, and is the session's state.
    """
    found = (hold for hold in holds if hold.kind is not HoldKind.MOVED)
    return sorted(found, key=lambda hold: (hold.stamp, hold.position, hold.lineage, hold.cut_id))


def _age(hold: Hold) -> tuple[int, int, bytes]:
    return hold.stamp, hold.position, hold.cut_id


def _rank(hold: Hold) -> tuple[bool, int]:
    """A turn end that is held again for another reason is still a turn end."""
    return hold.kind in (HoldKind.TURN, HoldKind.IMPORT), hold.stamp
