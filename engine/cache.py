"""The planes behind mlx-lm's cache protocol, one adapter per layer.

What a model asks of a cache is ``offset``, ``make_mask`` before its layers run and
``update_and_fetch`` inside each. The rule that this file keeps is *attend before you overwrite*: a
chunk that would replace rows which its own first queries still see is staged, and the ring is
written after the span for attention was built.

Which rows attention reads, and in which order, follows from position and call size alone. That is
why a restored session gives the bits of one that never moved.
"""

from __future__ import annotations

import mlx.core as mx

from engine.origins import Route, attention_route
from engine.planes import Plane


class PlaneCache:
    """One layer's cache as the model sees it.

    Attributes:
        plane: The rows.
    """

    __slots__ = ("_window_tokens", "plane")

    def __init__(self, plane: Plane, window_tokens: int | None) -> None:
        """Wrap ``plane``; ``window_tokens`` is None for a full layer."""
        self.plane = plane
        self._window_tokens = window_tokens

    @property
    def offset(self) -> int:
        """Absolute position of the next token; never a row count."""
        origins = self.plane.origins
        return origins.origin_logical + origins.length

    @property
    def keys(self) -> mx.array | None:
        """The key buffer, None while the cache is empty."""
        return self.plane.key

    @property
    def values(self) -> mx.array | None:
        """The value buffer, None while the cache is empty."""
        return self.plane.value

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask for a call of ``N`` tokens, made before any layer appended its rows.

        Args:
            N: Tokens of the call; the protocol fixes the name.
            return_array: Never answer with the word ``"causal"``.
            window_size: The window that the model masks with.

        Returns:
            None where every row of the span is visible, ``"causal"``, or a boolean
            ``[N, old + N]``, true where the query sees the key.

        Raises:
            ValueError: The model's window is not the layer's.
        """
        if window_size not in (None, self._window_tokens):
            raise ValueError(f"window {window_size}, but the layer's is {self._window_tokens}")
        if N == 1:
            # In place: the buffer holds exactly the rows that this query sees.
            return None
        old = self._old_rows()
        window = self._window_tokens
        fits = window is None or old + N <= window
        return "causal" if fits and not return_array else window_mask(N, old, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the call's rows and return those that attention reads.

        Args:
            keys: ``[1, kv_heads, count, key_dim]``, already rotated.
            values: ``[1, kv_heads, count, value_dim]``.

        Returns:
            Keys and values ``[1, kv_heads, rows, dim]``: the ring in physical order, or old rows
            in logical order followed by the call's.

        Raises:
            CacheDiscontinuity: The layers stand at different positions.
            ContextLimitError: The context is full.
            ValueError: Shape or dtype is not the layer's.
        """
        plane, count = self.plane, keys.shape[2]
        start = plane.origins.next_position
        if attention_route(plane.origins, count) is Route.STAGED:
            staged = self._staged(start, keys, values)
            plane.append_batch(start, keys, values)
            return staged
        if count == 1:
            plane.append(start, keys, values)
        else:
            plane.append_batch(start, keys, values)
        return plane.span()

    def _old_rows(self) -> int:
        """Rows before the call that its first query sees: at most ``window - 1``."""
        if self._window_tokens is None:
            return self.plane.length
        return min(self.plane.length, self._window_tokens - 1)

    def _staged(self, start: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Old rows un-rotated to logical order, then the chunk: one span for attention."""
        old = self._old_rows()
        if old == 0:
            return keys, values
        old_keys, old_values = self.plane.ordered(start - old, old)
        return (
            mx.concatenate([old_keys, keys], axis=2),
            mx.concatenate([old_values, values], axis=2),
        )


def window_mask(count: int, old: int, window_tokens: int | None) -> mx.array:
    """Boolean ``[count, old + count]``: the query at p sees keys ``p - window_tokens + 1 .. p``.

    Columns are the staged span: ``old`` rows before the call, then the call's own.
    """
    key = mx.arange(old + count)[None]
    query = mx.arange(old, old + count)[:, None]
    mask = query >= key
    return mask if window_tokens is None else mask & (query < key + window_tokens)
