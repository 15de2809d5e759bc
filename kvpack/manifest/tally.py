"""What the gate asks of references one by one, asked of each as it comes.

Whoever sends or takes a pack knows its references one after the other, while something else takes
longer; at the end of the pack everybody waits for the gate.
"""

from __future__ import annotations

from kvpack.chunk.reference import ChunkReference
from kvpack.codes import ChunkClass
from kvpack.errors import KvpackError
from kvpack.layout import CacheLayout
from kvpack.snapshot import TileSpec, check_runs


class Tally:
    """What references came to so far, under one layout.

    It only ever says yes. Where it does not, the gate asks everything, in the order of the
    specification, and says what is wrong.

    Attributes:
        layout: The shape that their rows must have.
        distinct: No two of them stand for one thing, nor for one object.
        epoch: The highest of theirs; 0 where there is none.
    """

    __slots__ = (
        "_places", "_runs", "_seal_ids", "_slots", "_sound", "_tokens", "distinct", "epoch",
        "layout",
    )  # fmt: skip

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.distinct = True
        self.epoch = 0
        self._sound = True
        self._slots: set[object] = set()
        self._seal_ids: set[bytes] = set()
        self._tokens = 0
        self._places: set[int] = set()
        self._runs: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, reference: ChunkReference) -> None:
        """One more, at the end."""
        slot, seal_id = reference.slot, reference.seal_id
        if slot in self._slots or seal_id in self._seal_ids:
            self.distinct = False
        self._slots.add(slot)
        self._seal_ids.add(seal_id)
        self.epoch = max(self.epoch, reference.epoch)
        self._sound = self._sound and self._is_sound(reference)

    def is_whole(self, position: int) -> bool:
        """Whether they are those of one whole state at ``position``, without parent and draft."""
        if not (self.distinct and self._sound and self._tokens == position):
            return False
        if not self._places <= {position}:
            return False
        try:
            check_runs(self.layout, position, self._runs)
        except KvpackError:
            return False
        return True

    def _is_sound(self, reference: ChunkReference) -> bool:
        if reference.is_trimmed or reference.part or reference.chunk_class is ChunkClass.DRAFT:
            # None of them is sent; the whole gate knows what to ask of them.
            return False
        if reference.has_rows:
            return self._takes_rows(reference)
        if reference.chunk_class is ChunkClass.TOKEN_IDS:
            follows = reference.first_position == self._tokens
            self._tokens += reference.token_count
            return follows
        logits = reference.chunk_class is ChunkClass.FINAL_LOGITS
        self._places.add(reference.first_position + logits)
        return True

    def _takes_rows(self, reference: ChunkReference) -> bool:
        spec: TileSpec = reference.tile_spec()
        try:
            expected = spec.data_bytes(self.layout)
        except KvpackError:
            return False
        runs = self._runs.setdefault(spec.layers, [])
        if runs and runs[-1][1] == spec.first_position:
            runs[-1] = (runs[-1][0], spec.end_position)
        else:
            runs.append((spec.first_position, spec.end_position))
        return reference.plain_bytes == expected
