"""The rows of one forward call, taken as the layers hand them over: a witness for what is kept.

A ring narrower than a call has lost the call's first rows when it ends. Whoever wants to check what
an engine kept of them needs them from somewhere that is neither the ring nor a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.cache import PlaneCache
from engine.call_logits import CallLogits
from engine.dtypes import host_view, token_major
from engine.generation import Generation
from engine.logits import Logits
from engine.model import Model
from engine.origins import PlaneLayout
from kvpack.errors import LayoutMismatchError
from kvpack.snapshot import Tile, TileSpec

_Rows = tuple[mx.array, mx.array]


class _ObservingCache(PlaneCache):
    """Writes as any cache does, and keeps what it was handed."""

    __slots__ = ("handed",)

    def __init__(self, cache: PlaneCache, window_tokens: int | None) -> None:
        super().__init__(cache.plane, window_tokens)
        self.handed: _Rows | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> _Rows:
        """As :meth:`PlaneCache.update_and_fetch`."""
        self.handed = (keys, values)
        return super().update_and_fetch(keys, values)


class ObservedCall:
    """One call over a session's planes, which are of no use afterwards.

    Attributes:
        logits: After each token of the call.
        first_position: Position of its first token.
    """

    __slots__ = ("_model", "_rows", "first_position", "logits")

    def __init__(self, model: Model, session: Generation, token_ids: Sequence[int]) -> None:
        """Make the call of ``token_ids``, at least one, on top of ``session``.

        Raises:
            ContextLimitError: The context is full.
            RuntimeError: ``session`` is not this model's.
        """
        self._model = model
        self.first_position = session.position
        caches = [
            _ObservingCache(cache, layer.window_tokens)
            for cache, layer in zip(session._caches, model.layout.layers, strict=True)
        ]
        said = CallLogits(model.forward(mx.array([list(token_ids)]), caches))
        self._rows = [_token_major(cache) for cache in caches]
        mx.eval(said.arrays(), self._rows)
        self.logits: tuple[Logits, ...] = said.split()

    def tile(self, spec: TileSpec) -> Tile:
        """The rows of ``spec``.

        Raises:
            LayoutMismatchError: One of them is not of this call.
        """
        first = spec.first_position - self.first_position
        count = self._rows[0][0].shape[1]
        if first < 0 or first + spec.token_count > count:
            live = f"[{self.first_position}, {self.first_position + count})"
            raise LayoutMismatchError("rows", f"rows in {live}", spec.first_position)
        encoding, parts = self._model.layout.encoding, []
        for layer in spec.layers:
            for array in self._rows[layer]:
                rows = token_major(host_view(array, encoding), PlaneLayout.TOKEN_MAJOR)
                parts.append(rows[first : first + spec.token_count].tobytes())
        return Tile(spec, b"".join(parts))


def _token_major(cache: _ObservingCache) -> _Rows:
    """Keys and values ``[1, count, kv_heads, dim]``, row-major. Lazy."""
    if cache.handed is None:
        raise RuntimeError("a layer handed nothing over")
    keys, values = (mx.contiguous(rows.transpose(0, 2, 1, 3)) for rows in cache.handed)
    return keys, values
