"""What the other end of a measurement holds already: a prefix of the rows that will be offered.

A node that serves has such chunks in its store of cuts. Here they are made and sealed again when
they are named: sealing is deterministic, so they are the objects that the source would have sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvpack.chunk import SealedChunk, seal_tile
from kvpack.limits import check_range
from kvpack.snapshot import Tile, TileSpec, cut_tile_specs
from node.bench.model import MadeModel, token_ids
from node.binding import PackBinding
from node.migration.held import HeldObjects, NothingHeld


class MadeTier:
    """Stands in for :class:`node.tier.Tier`: knows one prefix, as long as it was told."""

    def __init__(self, model: MadeModel, binding: PackBinding) -> None:
        self._model = model
        self._binding = binding
        self._held_tokens = 0
        self._specs: dict[bytes, TileSpec] = {}

    def hold(self, held_tokens: int) -> None:
        """Hold the cut after ``held_tokens`` tokens. Blocking: all of it is sealed once."""
        check_range("held_tokens", held_tokens, 0, self._model.context)
        self._held_tokens = held_tokens
        specs = cut_tile_specs(self._model.layout, held_tokens)
        self._specs = {self.seal(spec).reference.seal_id: spec for spec in specs}

    async def find(self, session_id: str, offered: Sequence[int]) -> HeldObjects:
        """The prefix, where the offered tokens begin with it id by id."""
        known = token_ids(self._held_tokens)
        if not known or list(offered[: len(known)]) != known:
            return NothingHeld()
        return _MadeObjects(self)

    def start(self, busy: Callable[[], bool]) -> None:
        """There is no work in the background."""

    async def close(self) -> None:
        """There is nothing to let go of."""

    def keep_later(self, session_id: str, path: Path, *, own: bool) -> None:
        """A spool is let go with its session: nothing that was made is worth keeping."""

    def seal_ids(self) -> list[bytes]:
        """Of all chunks of the prefix."""
        return list(self._specs)

    def read(self, seal_id: bytes) -> bytes | None:
        """The object with that seal id."""
        spec = self._specs.get(seal_id)
        return None if spec is None else self.seal(spec).object

    def seal(self, spec: TileSpec) -> SealedChunk:
        """The chunk of ``spec``."""
        return seal_tile(self._binding.context, made_tile(self._model, spec))


class _MadeObjects:
    """The prefix, for one transfer."""

    def __init__(self, tier: MadeTier) -> None:
        self._tier = tier

    def seal_ids(self) -> list[bytes]:
        return self._tier.seal_ids()

    def read(self, seal_id: bytes) -> bytes | None:
        return self._tier.read(seal_id)

    def close(self) -> None:
        return


def made_tile(model: MadeModel, spec: TileSpec) -> Tile:
    """The rows of ``spec``, made."""
    layout, count = model.layout, spec.token_count
    data, at = np.empty(spec.data_bytes(layout), np.uint8), 0
    for layer in spec.layers:
        for role, size in enumerate((layout.key_row_bytes(layer), layout.value_row_bytes(layer))):
            rows = data[at : at + count * size].reshape(count, size)
            model.rows.fill(layer, role, spec.first_position, rows)
            at += count * size
    data.flags.writeable = False
    return Tile(spec, data.data)
