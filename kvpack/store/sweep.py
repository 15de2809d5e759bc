"""Deleting: a plan is applied, and nothing goes that somebody relies on by then.

The steps are those of docs/spec/store-v1.md, section 6. Their order is what makes them safe: first
the sweep is published, then intents, holds and cuts are read again. A writer does it the other way
round: first its intent, then a look at the sweeps.

A collector must work on a full disk too. So a sweep that cannot be written becomes an empty one,
which needs no room and condemns everything as long as it is there; and an expired intent that
cannot be closed for want of room is left for the next time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvpack.manifest.sealed import MAC_BYTES
from kvpack.store import names
from kvpack.store.chain import Chain, read_chains
from kvpack.store.errors import ConflictError, StoreBusyError, StoreFullError
from kvpack.store.intent import finish
from kvpack.store.interface import ObjectData, ObjectStore
from kvpack.store.mark import CutCache, live_names, marks_of, read_roots, require_readable
from kvpack.store.plan import DELETE_ORDER, GcPlan, GcPolicy, is_old_leftover
from kvpack.store.records import Record, State
from kvpack.store.steps import Steps, delete, drive, list_names, put, stat

#: Names of one sweep: bounds its record and how long writers may have to wait for it.
SWEEP_NAMES = 4096

#: Names of one delete call.
BATCH_NAMES = 256


@dataclass(frozen=True, slots=True)
class GcResult:
    """What was done.

    Attributes:
        deleted: Objects that went.
        spared: Planned objects that stayed, because somebody relies on them by now.
        freed_bytes: Of what went, leftovers included.
        leftovers: Private files of crashed writers that went.
        closed: Intents that were closed, finished or cleared away.
    """

    deleted: int = 0
    spared: int = 0
    freed_bytes: int = 0
    leftovers: int = 0
    closed: int = 0


def apply_gc(
    store: ObjectStore, plan: GcPlan, now: int, collector_id: bytes, pause: Callable[[], None]
) -> GcResult:
    """Apply ``plan``. One collector at a time; writers and readers go on.

    Args:
        store: Which store.
        plan: What :func:`kvpack.store.plan.plan_gc` said.
        now: Seconds since 1970.
        collector_id: 16 random bytes, used once.
        pause: Waits for a moment.

    Raises:
        StoreBusyError: Another collector is at work.
        StoreError: A recent intent is damaged. Nothing was deleted.
        PublishError: The volume refuses.
    """
    names.check_bytes("collector_id", collector_id, names.WRITER_BYTES)
    with store.collector():
        # First what nobody else can know of: on a full disk this makes the room for the rest.
        removed = store.remove_leftovers([item.name for item in plan.leftovers])
        result = drive(store, sweep_steps(plan, now, collector_id), pause)
    freed_bytes = result.freed_bytes + sum(item.file_bytes for item in plan.leftovers)
    return dataclasses.replace(result, leftovers=removed, freed_bytes=freed_bytes)


def tidy_store(
    store: ObjectStore, now: int, pause: Callable[[], None], policy: GcPolicy | None = None
) -> GcResult:
    """The scan at a start: remove old leftovers, end stale sweeps, finish or close what expired.

    No cut and no chunk goes. Where a collector is at work there is nothing left to do.

    Raises:
        PublishError: The volume refuses.
        StoreError: A recent intent is damaged.
    """
    chosen = GcPolicy() if policy is None else policy
    old = [item for item in store.irregular() if is_old_leftover(item, now, chosen)]
    try:
        with store.collector():
            removed = store.remove_leftovers([item.name for item in old])
            drive(store, end_sweeps(BATCH_NAMES), pause)
            closed = drive(store, close_expired(chosen, now), pause)
    except StoreBusyError:
        return GcResult()
    freed_bytes = sum(item.file_bytes for item in old)
    return GcResult(freed_bytes=freed_bytes, leftovers=removed, closed=closed)


def discard(
    store: ObjectStore, doomed: Sequence[str], collector_id: bytes, pause: Callable[[], None]
) -> int:
    """Delete those of ``doomed`` that nobody relies on: what a save that failed has left.

    Where another collector is at work it is left to the next one. Returns how many went.

    Raises:
        PublishError: The volume refuses.
    """
    try:
        with store.collector():
            steps = sweep_once(list(doomed), frozenset(), collector_id, {}, BATCH_NAMES)
            return len(drive(store, steps, pause))
    except StoreBusyError:
        return 0


def sweep_steps(
    plan: GcPlan,
    now: int,
    collector_id: bytes,
    sweep_names: int = SWEEP_NAMES,
    batch_names: int = BATCH_NAMES,
) -> Steps[GcResult]:
    """Everything that is done while the collector's lock is held."""
    yield from end_sweeps(batch_names)
    closed = yield from close_expired(plan.policy, now, batch_names)
    gone: list[str] = []
    dropped = plan.dropped_names
    sizes = {item.name: item.object_bytes for item in plan.garbage}
    for condemned in _slices(list(sizes), sweep_names):
        gone += yield from sweep_once(
            condemned, dropped, collector_id, plan.cache, batch_names, plan.live_cuts
        )
    freed_bytes = sum(sizes[name] for name in gone)
    return GcResult(len(gone), len(sizes) - len(gone), freed_bytes, 0, closed)


def end_sweeps(batch_names: int) -> Steps[int]:
    """Step 2. Whoever held the lock before is dead, and deletes nothing any more."""
    stale = [item.name for item in (yield from list_names(f"{names.SWEEPS}/"))]
    return (yield from delete(stale, batch_names))


def _slices(ordered: list[str], size: int) -> Iterator[list[str]]:
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]


def sweep_once(
    condemned: list[str],
    dropped: frozenset[str],
    collector_id: bytes,
    cache: CutCache,
    batch_names: int,
    settled: frozenset[bytes] = frozenset(),
) -> Steps[list[str]]:
    """Delete what is still garbage of ``condemned``; returns those names.

    Args:
        condemned: Names.
        dropped: Holds that count as gone.
        collector_id: Whose sweep.
        cache: Cuts that were parsed.
        batch_names: Of one call.
        settled: Cuts that need nothing of ``condemned``: only those that came, or were held again,
            since it was worked out are looked at. Chunks of a cut never change.
    """
    # Step 4. Said before it is done: a writer that comes now waits for what is condemned.
    sweep = names.sweep_name(collector_id)
    try:
        yield from put([ObjectData(sweep, Record(State.SWEEP, pins=tuple(condemned)).encode())])
    except StoreFullError:
        yield from put([ObjectData(sweep, b"")])
    # Step 5. A writer that came before has said so.
    roots = yield from read_roots(cache)
    kinds = {names.kind_of(name) for name in condemned}
    entries: list[str] = []
    nodes: list[bytes] = []
    if kinds & {names.ENTRIES, names.NODES}:
        entries = [item.name for item in (yield from list_names(f"{names.ENTRIES}/"))]
    if names.NODES in kinds:
        listed = yield from list_names(f"{names.NODES}/")
        nodes = [names.node_ids(item.name) for item in listed]
    live = live_names(roots, dropped, entries, nodes, settled)
    doomed = [name for name in condemned if name not in live]
    # Step 6. A cut is gone for good before anything that it needed goes.
    for kind in DELETE_ORDER:
        of_kind = [name for name in doomed if names.kind_of(name) == kind]
        yield from delete(of_kind, batch_names)
    yield from delete([sweep], 1)
    return doomed


def close_expired(policy: GcPolicy, now: int, batch_names: int = BATCH_NAMES) -> Steps[int]:
    """Step 3: end the intents whose writers are gone. Returns how many.

    Raises:
        StoreError: A recent intent is damaged.
    """
    chains = yield from read_chains()
    require_readable(chains, now, policy.grace_s)
    count = 0
    for chain in chains:
        ended = yield from _end_chain(chain, policy, now)
        if ended:
            yield from delete(ended, batch_names)
            count += 1
    return count


def _end_chain(chain: Chain, policy: GcPolicy, now: int) -> Steps[tuple[str, ...]]:
    """Names of the files of a chain that has ended; empty where its writer may be alive."""
    if not chain.is_open:
        return chain.names
    if chain.expires + policy.grace_s >= now:
        return ()
    last = chain.records[-1]
    if last.state is State.PUBLISHING:
        # The writer had decided: all chunks were durable. What is left to do, anybody can do.
        try:
            if (yield from _is_whole(last.cut)):
                yield from finish(last)
        except StoreFullError:
            return ()
        return chain.names
    closing = names.intent_name(chain.writer_id, chain.length)
    try:
        yield from put([ObjectData(closing, Record(State.CLOSED).encode())])
    except (ConflictError, StoreFullError):
        return ()  # The writer was faster and lives, or there is no room to say so.
    return (*chain.names, closing)


def _is_whole(cut: bytes) -> Steps[bool]:
    """Whether every chunk of a decided cut is there."""
    marks = marks_of(cut, cut[-MAC_BYTES:])
    present = yield from stat(tuple(marks.object_names()))
    pairs = zip(present[::2], present[1::2], strict=True)
    return not marks.damage and all(shared or peer for shared, peer in pairs)
