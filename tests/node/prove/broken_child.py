"""The real child with one fault planted in the engine: what ``prove`` exists to find.

Argument: which fault.
"""

from __future__ import annotations

import sys

from engine.checkpoint_planes import PlaneMark
from engine.generation import Generation
from engine.origins import Origins
from node.prove import child


def install_at_rotation_zero() -> None:
    """The tidy install: rows from slot 0 on, in logical order."""
    real = Origins.restored.__func__

    def restored(cls, layer, capacity, position, *, wraps):
        origins = real(cls, layer, capacity, position, wraps=wraps)
        origins.origin_physical = 0
        return origins

    Origins.restored = classmethod(restored)


def forget_overwritten_rows() -> None:
    """Taking a block back moves the origins and leaves the block's rows in the ring."""

    def rewind(self, kept_tokens):
        self.plane.origins.rewind(self._mark)
        self.plane.origins.append_batch(self.plane.origins.next_position, kept_tokens)

    PlaneMark.rewind = rewind


def lose_a_row_when_read() -> None:
    """A torn snapshot: the last row of each tile is a copy of the one before."""
    real = Generation.read_tile

    def read_tile(self, spec):
        tile = real(self, spec)
        data = bytearray(tile.data)
        data[-2:] = data[-4:-2]
        return type(tile)(spec, bytes(data))

    Generation.read_tile = read_tile


def never_repeat() -> None:
    """A backend whose logits differ from call to call, whatever the cache does."""
    real, calls = Generation.step, [0]

    def step(self, token_id):
        logits = real(self, token_id)
        calls[0] += 1
        return type(logits)(logits.encoding, logits.data[:-2] + (calls[0] % 251).to_bytes(2))

    Generation.step = step


FAULTS = {
    "rotation": install_at_rotation_zero,
    "rollback": forget_overwritten_rows,
    "torn": lose_a_row_when_read,
    "backend": never_repeat,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    child.main()
