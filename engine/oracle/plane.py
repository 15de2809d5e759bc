"""The oracle's K/V history: every row since the first token, in order, never a ring.

A window is not a matter of storage here. The plane keeps what it was given, and attention masks
what a query may not see. Only a plane that was restored from a snapshot begins later than
position 0, because a snapshot holds a window; asking it for an older row is an error, so a row that
is not there can never be taken for one that is.
"""

from __future__ import annotations

import numpy as np

from engine.oracle.operators import Floats

#: Rows that a plane grows by at least; doubling keeps the copying linear in the length.
GROWTH_ROWS = 256


class HistoryPlane:
    """Keys and values of one layer for positions ``[origin, length)``.

    Args:
        keys: ``[rows, kv_heads, key_dim]`` float32, oldest first; rows begin at ``origin``.
        values: ``[rows, kv_heads, value_dim]`` float32, likewise.
        origin: Absolute position of the first row.
    """

    def __init__(self, keys: Floats, values: Floats, origin: int = 0) -> None:
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} key rows but {len(values)} value rows")
        self._keys = keys
        self._values = values
        self.origin = origin
        self.length = origin + len(keys)

    def write(self, first: int, keys: Floats, values: Floats) -> None:
        """Put the rows of positions ``first …`` and end the plane there.

        Rows from ``first`` on are replaced: a call that stopped half way through the layers is
        simply made again.

        Raises:
            ValueError: ``first`` would leave a gap, or lies before the origin.
        """
        if not self.origin <= first <= self.length:
            raise ValueError(f"expected position {self.length}, got {first}")
        begin, end = first - self.origin, first - self.origin + len(keys)
        self._keys = _grown(self._keys, end)
        self._values = _grown(self._values, end)
        self._keys[begin:end] = keys
        self._values[begin:end] = values
        self.length = self.origin + end

    def rows(self, first: int, end: int) -> tuple[Floats, Floats]:
        """Keys and values of positions ``[first, end)``, as views.

        Raises:
            ValueError: A position is not held.
        """
        if not self.origin <= first <= end <= self.length:
            raise ValueError(
                f"rows [{self.origin}, {self.length}) are held, [{first}, {end}) was asked for"
            )
        held = slice(first - self.origin, end - self.origin)
        return self._keys[held], self._values[held]


def empty_plane(kv_heads: int, key_dim: int, value_dim: int) -> HistoryPlane:
    """A plane that holds nothing yet."""
    return HistoryPlane(
        np.empty((0, kv_heads, key_dim), np.float32), np.empty((0, kv_heads, value_dim), np.float32)
    )


def _grown(rows: Floats, needed: int) -> Floats:
    """``rows`` itself where it is long enough, else a longer copy."""
    if needed <= len(rows):
        return rows
    longer = np.empty((max(needed, 2 * len(rows), GROWTH_ROWS), *rows.shape[1:]), np.float32)
    longer[: len(rows)] = rows
    return longer
