"""A model that only hashes: as exact as a real one, and a thousand times quicker.

Every row is a hash of its layer, its token and every row that is visible before it, and logits are
a hash of the same. So one row that is wrong, missing or in another place changes all that follows,
as it would in a real model. Shape, identity and windows are those of a real model.
"""

from __future__ import annotations

import functools

import blake3
import numpy as np

from engine import Logits
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallSchedule
from kvpack.layout import LayerKind
from kvpack.snapshot import Tile


class HashModel:
    """What nodes ask of a model."""

    def __init__(self, real) -> None:
        self.layout = real.layout
        self.vocab_size = real.vocab_size
        self.identity = functools.cache(real.identity)
        self.numerics = functools.cache(real.numerics)

    def new_generation(self) -> HashGeneration:
        return HashGeneration(self, {}, CallSchedule())

    def installer(self, position: int, *, growing: bool = False) -> HashInstaller:
        return HashInstaller(self, position, growing)


class HashGeneration:
    """The rows of one session: ``(layer, position)`` to the bytes of key and value."""

    def __init__(self, model: HashModel, rows, schedule: CallSchedule, mixed: bool = False) -> None:
        self.is_mixed = mixed
        self.layout = model.layout
        self.schedule = schedule
        self._vocab_size = model.vocab_size
        self._rows = rows
        self.position = schedule.position

    def prefill(self, token_ids) -> None:
        for token_id in token_ids:
            self._append(token_id)
        self.schedule = self.schedule.after_call(len(token_ids))

    def step(self, token_id: int) -> Logits:
        seen = self._append(token_id)
        self.schedule = self.schedule.after_call(1)
        words = np.frombuffer(blake3.blake3(seen).digest(2 * self._vocab_size), "<u2")
        # Below 1.0 as float16, so that every value is a number.
        return Logits(self.layout.encoding, (words & 0x3BFF).astype("<u2").tobytes())

    def read_tile(self, spec) -> Tile:
        data = bytearray()
        last = spec.first_position + spec.token_count
        for layer in spec.layers:
            rows = [self._rows[layer, p] for p in range(spec.first_position, last)]
            middle = self.layout.key_row_bytes(layer)
            data += b"".join(row[:middle] for row in rows)
            data += b"".join(row[middle:] for row in rows)
        return Tile(spec, bytes(data))

    def read_tiles(self, specs) -> list[Tile]:
        return [self.read_tile(spec) for spec in specs]

    def _append(self, token_id: int) -> bytes:
        """Compute the rows of one token; gives the hash of all that it saw."""
        seen = blake3.blake3(token_id.to_bytes(4, "little"))
        for layer, shape in enumerate(self.layout.layers):
            for position in range(shape.first_row(self.position), self.position):
                seen.update(self._rows[layer, position])
        digest = seen.digest()
        for layer, shape in enumerate(self.layout.layers):
            row = blake3.blake3(digest + bytes((layer,)))
            self._rows[layer, self.position] = row.digest(self.layout.row_bytes(layer))
            if shape.kind is LayerKind.SWA:
                self._rows.pop((layer, self.position - (shape.window_tokens or 0)), None)
        self.position += 1
        return digest


class HashInstaller:
    """Rows back into a generation, from tiles in any order."""

    def __init__(self, model: HashModel, position: int, growing: bool) -> None:
        self._model = model
        self._growing = growing
        self._rows = {}
        self.position = position

    def grow(self, position: int) -> None:
        if not self._growing:
            raise RuntimeError("this installer does not grow, or not any more")
        self.position = max(self.position, position)

    def fix(self, position: int) -> None:
        if position < self.position:
            raise LayoutMismatchError("position", f"at least {self.position}", position)
        self.grow(position)
        self._growing = False

    def scatter(self, tile: Tile) -> None:
        layout, spec = self._model.layout, tile.spec
        last = spec.first_position + spec.token_count
        for layer in spec.layers:
            shape = layout.layers[layer]
            if self._growing and shape.kind is LayerKind.SWA:
                raise LayoutMismatchError(f"layers[{layer}].rows", "none yet", "some")
            if not shape.first_row(self.position) <= spec.first_position < last <= self.position:
                raise LayoutMismatchError(f"layers[{layer}].rows", "rows of the cut", spec)
            if any((layer, p) in self._rows for p in range(spec.first_position, last)):
                raise LayoutMismatchError(f"layers[{layer}].rows", "new rows", spec)
        for layer, keys, values in tile.planes(layout):
            wide, more = layout.key_row_bytes(layer), layout.value_row_bytes(layer)
            for number, position in enumerate(range(spec.first_position, last)):
                key = keys[number * wide : (number + 1) * wide]
                self._rows[layer, position] = bytes(key) + values[number * more :][:more]

    def finish(self, schedule: CallSchedule, *, mixed: bool = False) -> HashGeneration:
        if schedule.position != self.position:
            raise LayoutMismatchError("schedule.position", self.position, schedule.position)
        for layer, shape in enumerate(self._model.layout.layers):
            for position in range(shape.first_row(self.position), self.position):
                if (layer, position) not in self._rows:
                    raise LayoutMismatchError(f"layers[{layer}].rows", "every row", position)
        return HashGeneration(self._model, self._rows, schedule, mixed)
