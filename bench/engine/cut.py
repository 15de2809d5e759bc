"""The stall of a cut: decode waits while the rings are copied, and for nothing else.

Rows of full layers below the cut are append-only, so they are read between later steps. What is
measured is what has to be done at the cut: every ring row of the reference geometry (52 layers,
window 2,048, 81,788,928 bytes) to immutable host memory, against a plain copy of as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.engine.measure import Timed, in_turns, timed
from bench.engine.models import NoNetwork, reference_layout
from engine import PlaneLayout
from kvpack.layout import LayerKind
from kvpack.snapshot import tile_specs

CUT_TOKENS = 32_768


@dataclass(frozen=True)
class CutStall:
    """What was measured.

    Attributes:
        timed: Seconds of the cut's stall against a plain copy of its rings.
        ring_bytes: Bytes of both.
    """

    timed: Timed
    ring_bytes: int


def cut_stall(rounds: int, plane_layout: PlaneLayout = PlaneLayout.HEAD_MAJOR) -> CutStall:
    """Rings that have wrapped, at a position that is not a multiple of the window."""
    layout = reference_layout()
    generation = NoNetwork(layout, plane_layout).new_generation()
    # An odd rotation, so that each ring is read in two runs.
    position = CUT_TOKENS + 17
    for call_tokens in [4096] * (CUT_TOKENS // 4096) + [17]:
        generation.prefill([1] * call_tokens)
    specs = list(tile_specs(layout, LayerKind.SWA, 0, position))
    ring_bytes = sum(spec.data_bytes(layout) for spec in specs)
    planes = [
        np.ones(2048 * layout.row_bytes(index), np.uint8)
        for index in layout.layers_of(LayerKind.SWA)
    ]
    found = in_turns(
        lambda: timed(lambda: [generation.read_tile(spec) for spec in specs]),
        lambda: timed(lambda: [plane.copy() for plane in planes]),
        rounds,
    )
    return CutStall(found, ring_bytes)
