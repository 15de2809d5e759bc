"""What a collector would do, as a value to look at before anything is done.

The plan is advice: applying it asks again, under a published sweep, what is live by then.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvpack import limits
from kvpack.store import names
from kvpack.store.budget import Budget, reserved_bytes
from kvpack.store.chain import Chain
from kvpack.store.interface import Irregular, ObjectStore, StoredObject, list_all
from kvpack.store.mark import CutCache, Live, Roots, live_names, read_roots, require_readable
from kvpack.store.names import Hold
from kvpack.store.records import State
from kvpack.store.retention import TURNS_KEPT, eviction_order, retained
from kvpack.store.shelf import Shelf
from kvpack.store.steps import drive

#: Kinds in the order in which they are deleted: what leads to a cut, the cut, what it needed.
DELETE_ORDER = (names.ENTRIES, names.HOLDS, names.CUTS, names.CHUNKS, names.PEER, names.NODES)

#: Kinds of which a store has very many.
SHELVED = (names.CHUNKS, names.PEER, names.NODES)


@dataclass(frozen=True, slots=True)
class GcPolicy:
    """What a collector goes by.

    Attributes:
        budget: How much the store may keep.
        needed_bytes: Room that is wanted beside what is kept.
        turns_kept: Turn ends that keep their windows.
        grace_s: How long after its expiry an intent is left alone. Closing it is safe at any time;
            this spares writers that are only slow.
        leftover_age_s: From which age a private file belongs to nobody. Far above the time that
            one object takes to write.

    Raises:
        LimitError: A number is outside its cap.
    """

    budget: Budget = field(default_factory=Budget)
    needed_bytes: int = 0
    turns_kept: int = TURNS_KEPT
    grace_s: int = 300
    leftover_age_s: int = 3600

    def __post_init__(self) -> None:
        limits.check_range("policy.needed_bytes", self.needed_bytes, 0, 1 << 60, "bytes")
        limits.check_range("policy.turns_kept", self.turns_kept, 1, 1 << 20)
        limits.check_range("policy.grace_s", self.grace_s, 0, 1 << 32, "seconds")
        limits.check_range("policy.leftover_age_s", self.leftover_age_s, 0, 1 << 32, "seconds")


class Why(enum.Enum):
    """Why a hold is dropped."""

    SUPERSEDED = "superseded by a later cut of its session"
    EVICTED = "evicted: no room"
    DANGLING = "its cut is gone or damaged"


@dataclass(frozen=True, slots=True)
class Drop:
    """A hold that goes."""

    hold: Hold
    why: Why


@dataclass(frozen=True, slots=True, repr=False)
class Inventory:
    """What lies in a store, by kind, and what is reached from where."""

    roots: Roots
    objects: dict[str, list[StoredObject]]
    shelves: dict[str, Shelf]
    irregular: tuple[Irregular, ...]
    free_bytes: int | None

    def of(self, kind: str) -> Iterable[StoredObject]:
        """All of one kind."""
        return self.shelves[kind] if kind in self.shelves else self.objects[kind]

    @property
    def used_bytes(self) -> int:
        """All bytes of all files."""
        objects = sum(item.object_bytes for items in self.objects.values() for item in items)
        shelves = sum(shelf.object_bytes for shelf in self.shelves.values())
        return objects + shelves + sum(item.file_bytes for item in self.irregular)


@dataclass(frozen=True, slots=True, repr=False)
class GcPlan:
    """What would go and what would stay.

    Attributes:
        drops: Holds that go, with the reason.
        garbage: Objects that go, in the order in which they do.
        leftovers: Private files of crashed writers that are old enough.
        closed: Writers whose intents have expired.
        kept_bytes: What stays.
        excess_bytes: By how much that still exceeds what there is room for; 0 where it fits.
        policy: What it was made by.
        cache: Cuts that were parsed.
        live_cuts: Cuts that stay. They need nothing of the garbage, by the plan's own reading.
    """

    drops: tuple[Drop, ...]
    garbage: tuple[StoredObject, ...]
    leftovers: tuple[Irregular, ...]
    closed: tuple[bytes, ...]
    kept_bytes: int
    excess_bytes: int
    policy: GcPolicy
    cache: CutCache
    live_cuts: frozenset[bytes]

    @property
    def freed_bytes(self) -> int:
        """Bytes that would be free again."""
        garbage = sum(item.object_bytes for item in self.garbage)
        return garbage + sum(item.file_bytes for item in self.leftovers)

    @property
    def dropped_names(self) -> frozenset[str]:
        """Names of the holds that go although their cuts are there.

        A dangling hold is not among them: it goes if its cut is still missing when it is looked at
        again, for somebody may have finished the cut by then.
        """
        return frozenset(drop.hold.name for drop in self.drops if drop.why is not Why.DANGLING)

    def lines(self) -> Iterator[str]:
        """The plan for people, one fact a line."""
        for why, count in sorted(Counter(drop.why.value for drop in self.drops).items()):
            yield f"drop {count} hold(s): {why}"
        sizes: dict[str, list[int]] = {}
        for item in self.garbage:
            sizes.setdefault(names.kind_of(item.name), []).append(item.object_bytes)
        for kind, found in sizes.items():
            yield f"delete {len(found)} of {kind}, {sum(found)} bytes"
        if self.leftovers:
            total = sum(item.file_bytes for item in self.leftovers)
            yield f"remove {len(self.leftovers)} leftover(s) of crashes, {total} bytes"
        if self.closed:
            yield f"close {len(self.closed)} expired intent(s)"
        yield f"keep {self.kept_bytes} bytes, free {self.freed_bytes} bytes"
        if self.excess_bytes:
            yield f"{self.excess_bytes} bytes above the budget cannot be freed: they are in use"


def plan_gc(store: ObjectStore, now: int, policy: GcPolicy | None = None) -> GcPlan:
    """Look at everything and say what a collector would do. Changes nothing.

    Args:
        store: Which store.
        now: Seconds since 1970.
        policy: What to keep; by default the default budget and retention.

    Raises:
        StoreError: A recent intent is damaged, or something cannot be read.
        VersionError: Something of a newer version lies here.
    """
    chosen = GcPolicy() if policy is None else policy
    inventory = take_inventory(store)
    require_readable(inventory.roots.chains, now, chosen.grace_s)
    return make_plan(inventory, now, chosen, {})


def take_inventory(store: ObjectStore, cache: CutCache | None = None) -> Inventory:
    """Read everything that a plan is made from."""
    roots = drive(store, read_roots({} if cache is None else cache), _no_pause)
    few = [kind for kind in names.KINDS if kind not in SHELVED]
    objects = {kind: list_all(store, f"{kind}/") for kind in few}
    shelves = {kind: Shelf(kind, store.scan(f"{kind}/")) for kind in SHELVED}
    return Inventory(roots, objects, shelves, store.irregular(), store.free_bytes())


def _no_pause() -> None:
    """Reading never waits for anybody."""


def make_plan(inventory: Inventory, now: int, policy: GcPolicy, cache: CutCache) -> GcPlan:
    """The plan for an inventory. Pure."""
    closed = tuple(
        chain.writer_id for chain in inventory.roots.chains if has_ended(chain, now, policy)
    )
    open_chains = tuple(c for c in inventory.roots.chains if c.writer_id not in closed)
    roots = Roots(open_chains, inventory.roots.holds, inventory.roots.cuts)
    cache.update({names.cut_name(cut.cut_id): cut for cut in roots.cuts.values()})
    drops = [*_dangling(roots), *_superseded(roots, policy.turns_kept)]
    leftovers = tuple(item for item in inventory.irregular if is_old_leftover(item, now, policy))
    limit = _limit_bytes(inventory, policy, reserved_bytes(list(open_chains), now))
    limit -= sum(item.file_bytes for item in inventory.irregular if item not in leftovers)
    dropped = frozenset(drop.hold.name for drop in drops)
    live = _live(inventory, roots, dropped)
    kept_bytes = _kept_bytes(inventory, live)
    if kept_bytes > limit:
        evicted, kept_bytes = _evict(inventory, roots, dropped, live, kept_bytes, limit)
        drops.extend(Drop(hold, Why.EVICTED) for hold in evicted)
        live = _live(inventory, roots, frozenset(drop.hold.name for drop in drops))
    return GcPlan(
        drops=tuple(drops),
        garbage=tuple(
            item
            for kind in DELETE_ORDER
            for item in sorted(item for item in inventory.of(kind) if item.name not in live)
        ),
        leftovers=leftovers,
        closed=closed,
        kept_bytes=kept_bytes,
        excess_bytes=max(0, kept_bytes - limit),
        policy=policy,
        cache=cache,
        live_cuts=frozenset(live.cuts),
    )


def is_old_leftover(item: Irregular, now: int, policy: GcPolicy) -> bool:
    """Whether a private file belongs to nobody any more: no object takes that long to write."""
    return item.is_leftover and item.modified_s + policy.leftover_age_s < now


def has_ended(chain: Chain, now: int, policy: GcPolicy) -> bool:
    """Whether an intent pins nothing any more. One that has decided on a cut pins it for ever:
    a collector finishes it first."""
    if not chain.is_open:
        return True
    if chain.records[-1].state is State.PUBLISHING:
        return False
    return chain.expires + policy.grace_s < now


def _limit_bytes(inventory: Inventory, policy: GcPolicy, reserved: int) -> int:
    """What may stay: the budget, or less where the real disk is nearly full."""
    limit = policy.budget.bytes_max
    if inventory.free_bytes is not None:
        volume = inventory.used_bytes + inventory.free_bytes - policy.budget.free_bytes_min
        limit = min(limit, volume)
    return limit - policy.needed_bytes - reserved


def _live(inventory: Inventory, roots: Roots, dropped: frozenset[str]) -> Live:
    entries = [item.name for item in inventory.of(names.ENTRIES)]
    nodes = (ids for ids, _ in inventory.shelves[names.NODES].items())
    return live_names(roots, dropped, entries, nodes)


def _kept_bytes(inventory: Inventory, live: Live) -> int:
    """What stays: all that is live, and what collectors and writers have to say."""
    fixed = inventory.objects[names.INTENTS] + inventory.objects[names.SWEEPS]
    kept = sum(
        item.object_bytes
        for kind in DELETE_ORDER
        for item in inventory.of(kind)
        if item.object_bytes and item.name in live
    )
    return kept + sum(item.object_bytes for item in fixed)


def _dangling(roots: Roots) -> Iterator[Drop]:
    """Holds of cuts that are not there or cannot be read. A writer pins its hold before its cut."""
    pins = roots.pins()
    for hold in roots.holds:
        cut = roots.cuts.get(hold.cut_id)
        if (cut is None or cut.damage) and hold.name not in pins:
            yield Drop(hold, Why.DANGLING)


def _superseded(roots: Roots, turns_kept: int) -> Iterator[Drop]:
    pins = roots.pins()
    lineages: dict[bytes, list[Hold]] = {}
    for hold in roots.holds:
        cut = roots.cuts.get(hold.cut_id)
        if cut is not None and not cut.damage:
            lineages.setdefault(hold.lineage, []).append(hold)
    for holds in lineages.values():
        newest = max(holds, key=lambda hold: (hold.position, hold.stamp))
        cadence = roots.cuts[newest.cut_id].cadence_tokens
        keep = retained(holds, cadence, turns_kept)
        for hold in holds:
            if hold not in keep and hold.name not in pins:
                yield Drop(hold, Why.SUPERSEDED)


def _evict(
    inventory: Inventory,
    roots: Roots,
    dropped: frozenset[str],
    live: Live,
    kept_bytes: int,
    limit: int,
) -> tuple[list[Hold], int]:
    """Holds to evict, in order, until what stays fits ``limit``; and how much stays then."""
    pins = roots.pins()
    cuts = frozenset(live.cuts)
    sizes = _sizes(inventory, live)
    pinned = frozenset(_key_of(name) for name in pins if names.kind_of(name) in _WEIGHED)
    uses = Counter(key for cut_id in cuts for key in _needs(roots, cut_id) if key in sizes)
    holds = [hold for hold in roots.holds if hold.cut_id in cuts and hold.name not in dropped]
    holding = Counter(hold.cut_id for hold in holds)
    evicted: list[Hold] = []
    for hold in eviction_order(holds):
        if kept_bytes <= limit:
            break
        if hold.name in pins or names.cut_name(hold.cut_id) in pins:
            continue
        evicted.append(hold)
        holding[hold.cut_id] -= 1
        if holding[hold.cut_id]:
            continue
        for key in _needs(roots, hold.cut_id):
            uses[key] -= 1
            if uses[key] == 0 and key not in pinned:
                kept_bytes -= sizes.get(key, 0)
    return evicted, kept_bytes


#: Kinds whose objects have bytes and belong to a cut.
_WEIGHED = (names.CUTS, names.CHUNKS, names.PEER)


def _key_of(name: str) -> bytes:
    """A cut, a chunk or a peer's chunk in few bytes; those of two kinds never meet."""
    kind, _, text = name.partition("/")
    ids = bytes.fromhex(text.replace("-", ""))
    return b"c" + ids if kind == names.CUTS else ids


def _sizes(inventory: Inventory, live: Live) -> dict[bytes, int]:
    return {
        _key_of(item.name): item.object_bytes
        for kind in _WEIGHED
        for item in inventory.of(kind)
        if item.name in live
    }


def _needs(roots: Roots, cut_id: bytes) -> Iterator[bytes]:
    yield b"c" + cut_id
    for seal_id in roots.cuts[cut_id].each_seal_id():
        yield seal_id
        yield cut_id + seal_id
