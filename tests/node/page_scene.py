"""A node at a busy moment, as values: for parts of the page that a small real node is seldom in."""

from __future__ import annotations

from collections import Counter

from node.economics.summary import Economy, economy_of
from node.economics.values import CutCost, Prefill, Restored, Tier
from node.metrics.memory import MemoryShape
from node.metrics.recorder import Recorder
from node.metrics.views import (
    Direction,
    EndedMove,
    LadderView,
    LeaseView,
    MoveView,
    NodeStatus,
    NodeView,
    SessionView,
    Standing,
)
from node.serving.counts import Counts
from node.serving.health import HealthState
from node.serving.ladder.accounts import Accounts
from node.serving.order import MissReason, Rung
from node.serving.slots import SlotState
from node.serving.view import FloorView, SlotView

NOW_S = 10_000.0

#: The reference geometry: 39 window layers, 13 full ones, 1,024 B per layer and token.
MEMORY = MemoryShape(((2048, 39 * 1024),), 39, 13 * 1024, 13, True, 131_072)


def counts() -> Counts:
    cached = dict.fromkeys(Rung, 0) | {
        Rung.CURRENT: 81_204, Rung.RESIDENT: 40_960, Rung.DURABLE: 22_528,
    }  # fmt: skip
    return Counts(
        submitted=142, finished=131, cancelled=7, failed=1, prompt_tokens=168_010,
        evaluated_tokens=23_318, cached_tokens=cached, generated_tokens=31_877,
    )  # fmt: skip


def accounts() -> Accounts:
    misses = dict.fromkeys(MissReason, 0) | {
        MissReason.NONE: 96, MissReason.COLD: 31, MissReason.INPUT_CHANGED: 12,
    }  # fmt: skip
    begun = dict.fromkeys(Rung, 0) | {Rung.RESIDENT: 44, Rung.DURABLE: 12, Rung.CURRENT: 61}
    return Accounts(begun, misses, 845_152_256, published=88, damaged=0, memory_bytes=600_000_000)


def economy() -> Economy:
    return economy_of(
        (
            CutCost(b"c", 12_288, MEMORY.full_bytes(12_288) + MEMORY.ring_bytes(12_288)),
            CutCost(
                b"a", 8_192, MEMORY.full_bytes(8_192) + MEMORY.ring_bytes(8_192),
                Prefill(0, 8_192, 17.0, 16.0),
                (
                    Restored(Tier.DISK, (0.51, 0.31, 0.34)),
                    Restored(Tier.MEMORY, (0.084,)),
                ),
            ),
            CutCost(b"b", 4_096, 0, Prefill(2_048, 2_048, 4.5, 4.0), ()),
        )
    )  # fmt: skip


def sessions() -> tuple[SessionView, ...]:
    return (
        SessionView("conv_8f2c41d09ab7", "studio", Standing.SERVING, 24_310, 24_311, 1),
        SessionView("conv_07aa", "studio", Standing.HANDING_OVER, 9_472, 9_473),
        SessionView("planning-the-garden", "studio", Standing.SERVING, 3_904, 3_905),
        SessionView("conv_51b0c3", "studio", Standing.DORMANT, 0, 17_002),
        SessionView("conv_e4410f", "laptop", Standing.ELSEWHERE),
    )


def status() -> NodeStatus:
    floor = FloorView(
        HealthState.OK, "",
        (
            SlotView(0, SlotState.DECODE, 24_311, 24_310, 24_100, 211, True, 6.2),
            SlotView(1, SlotState.PREFILL, 12_000, 5_120, 12_000, 0, False, 2.2),
            SlotView(2, SlotState.PAUSED, 1_801, 1_800, 1_700, 101, False, 9.0),
            SlotView(3, SlotState.IDLE, 2_113, 2_112),
        ), 3, 64, True,
    )  # fmt: skip
    total = MEMORY.ring_bytes(9_472) + MEMORY.full_bytes(9_472)
    return NodeStatus(
        "studio", "muse-glimmer-24b-4bit", "f16le", "0.7.0", HealthState.OK, "",
        1_790_000_000.0, 93_784.0, LeaseView(11.4, 15.0, 2, 1), MEMORY, floor, counts(), 61.4,
        LadderView(268_435_456, 536_870_912, 1), accounts(), None, economy(), sessions(), 4, 64,
        (
            NodeView("studio", True, 11.4, 4, "127.0.0.1:8080"),
            NodeView("laptop", False, 9.1, 1),
            NodeView("cuda-box", False, 0.0, 0),
        ),
        (
            MoveView("conv_07aa", Direction.OUT, "laptop", False, "streaming",
                     int(total * 0.72), total, 41_500_000.0, 3.5),
            MoveView("transient.00ff", Direction.IN, "cuda-box", True, "open",
                     201_326_592, 1_826_619_392, 212_000_000.0, 0.9),
        ),
    )  # fmt: skip


def recorder() -> Recorder:
    made = Recorder(lambda: NOW_S)
    made.last_moves.append(
        EndedMove("conv_e4410f", Direction.OUT, "laptop", False, "", 312_475_648, 7.4, 0.081,
                  NOW_S - 130)
    )  # fmt: skip
    made.last_moves.append(
        EndedMove("conv_51b0c3", Direction.OUT, "cuda-box", False, "consent_needed", 0, 0.2, None,
                  NOW_S - 44)
    )  # fmt: skip
    for reason in ("context_length_exceeded", "invalid_api_key", "invalid_api_key", "overloaded"):
        made.refuse(reason)
    made.refused = Counter(made.refused)
    return made
