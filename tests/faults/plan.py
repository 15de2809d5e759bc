"""What goes wrong in one run: drawn from a seed, so that a run can be repeated alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from node.fault_points import POINTS

from .lab import NODE_LEASE_S

#: How the session is handed over: while it decodes, with a prompt to prefill, or as a copy.
MODES = ("live", "known", "copy")

#: Points at which an error may come up in nature: a refusal, a full disk, a lost reply.
MAY_FAIL = frozenset(
    {
        "source.prepare.before", "source.prepare.after", "source.chunk.sent", "source.frozen",
        "source.seal.before", "source.seal.after", "source.commit.before", "source.commit.after",
        "target.claim.after", "target.chunk.taken", "target.gate.after", "target.probe.after",
        "target.spool.flushed", "target.link.before", "target.link.after",
        "target.cas.before", "target.cas.after",
    }
)  # fmt: skip

#: Points that are reached many times in one transfer.
MANY = {"source.chunk.sent": 8, "target.chunk.taken": 8, "target.reload.taken": 4}

#: Points that only something else leads to: orders of the giving and of the taking end before.
LEADS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "source.raise.before": ((), ("target.gate.after=raise",)),
    "source.raise.after": ((), ("target.probe.after=raise",)),
    "source.thaw.before": ((), ("target.gate.after=raise",)),
    "source.abort.before": ((), ("target.chunk.taken:2=raise",)),
    "target.discard.dropped": (("source.seal.before=raise",), ()),
    "target.settle.recorded": ((), ("target.swap.before=kill",)),
    "target.reload.begun": ((), ("target.chunk.taken:3=kill",)),
    "target.reload.taken": ((), ("target.chunk.taken:5=kill",)),
    "target.restore.raised": ((), ("target.record.after=kill",)),
}

#: What may happen to one end while a plan is about the other one.
RIVALS_SOURCE = (
    "source.chunk.sent:2=kill",
    "source.seal.before=kill",
    "source.commit.before=kill",
    "source.commit.before=stop",
)
RIVALS_TARGET = (
    "target.chunk.taken:2=kill",
    "target.gate.after=stop",
    "target.link.after=kill",
    "target.cas.before=stop",
    "target.cas.after=kill",
)

#: Points that a copy never reaches: it transfers nothing.
MOVES_ONLY = frozenset(
    point
    for point in POINTS
    if point.startswith(("source.owner", "source.raise", "source.thaw", "source.release"))
)


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: Where it came from.
        mode: How the session is handed over.
        point: The point that the run is about; empty where only the link fails.
        source: Orders of the giving end; the next one holds once the one before has ended it.
        target: Orders of the taking end.
        cuts: Bytes after which the link breaks, for one connection after the other.
        again: Whether a client asks once more for a move that failed.
        pause_s: How long a paused process stays so.
        lock_s: How long the directory takes no writes meanwhile.
    """

    seed: int
    mode: str
    point: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    cuts: tuple[int, ...]
    again: bool
    pause_s: float
    lock_s: float = 0.0

    def __str__(self) -> str:
        orders = " ".join([*self.source, *self.target, *(f"cut:{n}" for n in self.cuts)])
        lock = f" directory away {self.lock_s:.1f} s" if self.lock_s else ""
        return f"seed {self.seed}: {self.mode}: {orders}{lock}"


def plan_of(seed: int, point: str | None = None, action: str | None = None) -> Plan:
    """The plan of a seed; ``point`` and ``action`` fix what would be drawn."""
    draw = random.Random(seed)
    # Every point in turn: whatever the number of runs, none is left out.
    point = POINTS[seed % len(POINTS)] if point is None else point
    moves_only = point in MOVES_ONLY
    mode = draw.choice([one for one in MODES if one != "copy" or not moves_only])
    if point == "source.frozen":
        mode = draw.choice(["live", "copy"])
    action = _action(draw, point) if action is None else action
    cuts = tuple(int(10 ** draw.uniform(3.3, 5.2)) for _ in range(draw.randint(1, 4)))
    again = draw.random() < 0.5
    pause_s = draw.uniform(0.2, 1.5) if draw.random() < 0.7 else NODE_LEASE_S + draw.random()
    if draw.random() < 0.12 and point not in LEADS:
        return Plan(seed, mode, "", (), (), cuts, again, pause_s)
    nth = draw.randint(1, MANY[point]) if point in MANY else 1
    order = f"{point}:{nth}={action}"
    before_source, before_target = LEADS.get(point, ((), ()))
    if point.startswith("source."):
        source, target = (*before_source, order), before_target
    else:
        source, target = before_source, (*before_target, order)
    if draw.random() < 0.25:
        # Something else happens to the other end meanwhile.
        other = draw.choice(RIVALS_TARGET if source and not target else RIVALS_SOURCE)
        source, target = (source, (other,)) if source and not target else ((other,), target)
    with_cut = cuts[:1] if draw.random() < 0.1 else ()
    # Shorter and longer than a node's lease.
    lock_s = draw.uniform(0.3, 1.5 * NODE_LEASE_S) if draw.random() < 0.15 else 0.0
    return Plan(seed, mode, point, source, target, with_cut, again, pause_s, lock_s)


def _action(draw: random.Random, point: str) -> str:
    choices = ["kill"] * 6 + ["exit"] + ["stop"] * 3
    if point in MAY_FAIL:
        choices += ["raise"] * 3
    return draw.choice(choices)
