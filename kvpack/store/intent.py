"""Intents: what a writer relies on, said before it relies on it.

A writer's intent is a chain of records, numbered from 0. Each adds names; together they pin all of
them, until the last record expires. Number N is made by conditional create, so writer and collector
never disagree about how a chain goes on:

- the writer appends OPEN to rely on more, or to live longer;
- the writer appends PUBLISHING when the cut is decided: the rest anybody may finish;
- a collector appends CLOSED to an expired chain. The writer's next append then fails, and it knows
  that it must begin again.

A chain whose number 0 is gone has ended. Chains are deleted from number 0 upwards, so a writer that
slept through everything finds number 0 missing after its append.

Against a collector that is at work, the writer says first and looks afterwards: it appends the
names, then reads the sweeps. The collector publishes its sweep, then reads the intents. So at least
one of the two sees the other, whatever the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpack.errors import KvpackError, VersionError
from kvpack.manifest.sealed import MAC_BYTES
from kvpack.store import names
from kvpack.store.errors import ConflictError, IntentLostError, NotStoredError, StoreBusyError
from kvpack.store.interface import ObjectData
from kvpack.store.records import Record, State, decode_record
from kvpack.store.steps import Steps, delete, get, list_names, pause, put, stat


@dataclass(slots=True, repr=False)
class Intent:
    """A writer's own side of its chain.

    Attributes:
        writer_id: 16 bytes, random, used for one chain only.
        length: Records so far.
        pins: Names that are pinned, and that no sweep threatens.
        unsettled: Names that were appended, but whose sweeps have not ended yet.
    """

    writer_id: bytes
    length: int = 0
    pins: set[str] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        names.check_bytes("intent.writer_id", self.writer_id, names.WRITER_BYTES)


def pin(
    intent: Intent, wanted: Iterable[str], expires: int, reserve_bytes: int, pauses_max: int
) -> Steps[None]:
    """Rely on ``wanted`` until ``expires``: after this no collector takes them.

    Args:
        intent: The writer's chain.
        wanted: Names of objects, there or yet to be made.
        expires: Seconds since 1970.
        reserve_bytes: What the writer has still to write.
        pauses_max: How often to wait for a collector that is at work on one of them.

    Raises:
        IntentLostError: The chain was closed.
        StoreBusyError: The collector is still at work. What was appended stays appended.
    """
    known = intent.pins | intent.unsettled
    new = [name for name in dict.fromkeys(wanted) if name not in known]
    record = Record(State.OPEN, expires, reserve_bytes, tuple(new))
    yield from append(intent, record)
    intent.unsettled.update(new)
    yield from settle(intent, pauses_max)


def rely(
    intent: Intent, wanted: Sequence[str], expires: int, reserve_bytes: int, pauses_max: int
) -> Steps[None]:
    """Pin ``wanted``, all of which must be there.

    Raises:
        NotStoredError: Names the first that is not. And everything that :func:`pin` raises.
    """
    yield from pin(intent, wanted, expires, reserve_bytes, pauses_max)
    yield from require_stored(wanted)


def publish(
    intent: Intent,
    chunks: Sequence[str],
    cut: bytes,
    completions: Sequence[str],
    expires: int,
    pauses_max: int,
) -> Steps[None]:
    """Publish a cut whose chunks are pinned and stored.

    Args:
        intent: The writer's chain.
        chunks: Names of all chunks of the cut.
        cut: Header and manifest.
        completions: Names of the hold and of the index entries that belong to it.
        expires: Seconds since 1970.
        pauses_max: How often to wait for a collector.

    Raises:
        NotStoredError: A chunk is missing. And everything that :func:`pin` raises.
    """
    wanted = (names.cut_name(cut[-MAC_BYTES:]), *completions)
    yield from pin(intent, wanted, expires, 0, pauses_max)
    yield from require_stored(chunks)
    # From here on the cut is decided: a collector would finish it if we died.
    record = Record(State.PUBLISHING, expires, 0, (), tuple(completions), cut)
    yield from append(intent, record)
    yield from finish(record)


def require_stored(wanted: Sequence[str]) -> Steps[None]:
    """Refuse to go on where one of ``wanted`` is missing.

    Raises:
        NotStoredError: Names the first.
    """
    for name, found in zip(wanted, (yield from stat(wanted)), strict=True):
        if found is None:
            raise NotStoredError(name)


def append(intent: Intent, record: Record) -> Steps[None]:
    """Append ``record`` to the chain.

    Raises:
        IntentLostError: The chain was closed, or ended.
    """
    name = names.intent_name(intent.writer_id, intent.length)
    try:
        (created,) = yield from put([ObjectData(name, record.encode())])
    except ConflictError:
        raise IntentLostError(f"{name}: the intent expired and was closed") from None
    if not created:
        raise IntentLostError(f"{name}: a writer id was used twice")
    intent.length += 1
    (first,) = yield from stat([names.intent_name(intent.writer_id, 0)])
    if first is None:
        yield from delete([name], 1)
        raise IntentLostError(f"{name}: the intent expired and was closed")


def settle(intent: Intent, pauses_max: int) -> Steps[None]:
    """Wait until no sweep threatens what was appended.

    Raises:
        StoreBusyError: One still does after ``pauses_max`` pauses.
    """
    for _ in range(pauses_max + 1):
        if not intent.unsettled:
            return
        threatened = yield from _is_threatened(intent.unsettled)
        if not threatened:
            intent.pins |= intent.unsettled
            intent.unsettled.clear()
            return
        yield from pause()
    raise StoreBusyError("a collector is at work on objects that are needed; retry later")


def _is_threatened(wanted: set[str]) -> Steps[bool]:
    for stored in (yield from list_names(f"{names.SWEEPS}/")):
        try:
            sweep = decode_record((yield from get(stored.name)))
        except NotStoredError:
            continue  # it ended
        except VersionError:
            raise
        except KvpackError:
            return True  # what it condemns cannot be told
        if not wanted.isdisjoint(sweep.pins):
            return True
    return False


def finish(record: Record) -> Steps[None]:
    """Make the cut of a PUBLISHING record visible. Doing so twice, or at once, does no harm.

    The hold comes before the cut, so that no moment shows a cut that nobody holds; the prefix
    index comes after it, so that no entry leads to nothing.
    """
    before = [name for name in record.completions if names.kind_of(name) == names.HOLDS]
    after = [name for name in record.completions if names.kind_of(name) != names.HOLDS]
    yield from put(ObjectData(name, b"") for name in before)
    yield from put([ObjectData(names.cut_name(record.cut[-MAC_BYTES:]), record.cut)])
    for kind in (names.NODES, names.ENTRIES):
        yield from put(ObjectData(name, b"") for name in after if names.kind_of(name) == kind)


def end(intent: Intent, batch_names: int = 256) -> Steps[None]:
    """Give up all pins. From number 0 upwards: see above."""
    doomed = [names.intent_name(intent.writer_id, number) for number in range(intent.length)]
    yield from delete(doomed, batch_names)
    intent.pins.clear()
    intent.unsettled.clear()
