"""The next single-token call, built while the present one is computed.

Building a call's graph takes Python about a tenth of a millisecond per layer, and needs everything
but the token. So it is built with a place for the token, while the device computes, and laid aside:
planes and origins are as if it did not exist until it is committed. Commit writes the token into
its place and swaps the built planes in; whoever does anything else first drops it.

The graph is the one that an ordinary call would build, so no bit depends on it. On MLX's CPU
backend handing a graph over takes nearly as long as computing it; what overlaps there is the last
product, onto the whole vocabulary, and building takes about as long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from engine.cache import PlaneCache
from engine.dtypes import host_fill_works
from engine.planes import Plane


def pays_here() -> bool:
    """Whether calls can be built ahead: MLX must see a token that is written after the building."""
    return host_fill_works()


Forward = Callable[[mx.array, Sequence[PlaneCache]], mx.array]


#: Key buffer, value buffer, length, origin_logical, origin_physical of one plane.
_State = tuple[mx.array | None, mx.array | None, int, int, int]


def _state(plane: Plane) -> _State:
    origins = plane.origins
    return (
        plane.key, plane.value,
        origins.length, origins.origin_logical, origins.origin_physical,
    )  # fmt: skip


def _put(plane: Plane, state: _State) -> None:
    origins = plane.origins
    plane.key, plane.value = state[0], state[1]
    origins.length, origins.origin_logical, origins.origin_physical = state[2:]


class AheadCall:
    """A call of one token that is not known yet."""

    __slots__ = ("_after", "_before", "_logits", "_token")

    def __init__(self, forward: Forward, caches: Sequence[PlaneCache]) -> None:
        """Build it. The planes are as before when this returns, and when it raises.

        Raises:
            CacheDiscontinuity: The layers stand at different positions.
            ContextLimitError: The context is full.
        """
        planes = [cache.plane for cache in caches]
        # An array made from values is in memory at once, and nobody else refers to it.
        self._token = mx.array([[0]])
        self._before = [_state(plane) for plane in planes]
        self._after: list[_State] = []
        try:
            for plane in planes:
                # A slice update moves the handle it is made through: the planes' own must stay.
                plane.key, plane.value = copy.copy(plane.key), copy.copy(plane.value)
            self._logits = forward(self._token, caches)
            self._after = [_state(plane) for plane in planes]
        finally:
            for plane, state in zip(planes, self._before, strict=True):
                _put(plane, state)

    def fits(self, caches: Sequence[PlaneCache]) -> bool:
        """Whether the planes still are what the call was built on."""
        for cache, before in zip(caches, self._before, strict=True):
            plane = cache.plane
            key, value, length, logical, physical = before
            origins = plane.origins
            if (
                plane.key is not key or plane.value is not value
                or origins.length != length or origins.origin_logical != logical
                or origins.origin_physical != physical
            ):  # fmt: skip
                return False
        return True

    def commit(self, token_id: int, caches: Sequence[PlaneCache]) -> mx.array:
        """Make it the call of ``token_id``: its rows are in the planes. Logits ``[1, 1, vocab]``.

        Nothing is evaluated yet. Once only.
        """
        np.array(self._token, copy=False)[0, 0] = token_id
        for cache, state in zip(caches, self._after, strict=True):
            _put(cache.plane, state)
        # Handles to the old buffers would make each slice update copy its plane.
        self._before = []
        self._after = []
        return self._logits
