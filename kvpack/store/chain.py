"""Intents as a collector finds them: chains of records, read without any key."""

from __future__ import annotations

from dataclasses import dataclass

from kvpack.errors import KvpackError, VersionError
from kvpack.store import names
from kvpack.store.errors import NotStoredError
from kvpack.store.records import Record, State, decode_record
from kvpack.store.steps import Steps, get, list_names


@dataclass(frozen=True, slots=True)
class Chain:
    """A writer's chain as a collector finds it.

    Attributes:
        writer_id: Whose.
        records: Numbers 0 and up, without a gap; empty where number 0 is gone.
        length: One more than the highest number that was seen.
        modified_s: When its last file was written.
        is_readable: False where a record is damaged: what it pins cannot be told.
    """

    writer_id: bytes
    records: tuple[Record, ...]
    length: int
    modified_s: float
    is_readable: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its files, in the order in which they must go."""
        return tuple(names.intent_name(self.writer_id, number) for number in range(self.length))

    @property
    def is_open(self) -> bool:
        """Whether its writer may still rely on the pins."""
        return bool(self.records) and self.records[-1].state is not State.CLOSED

    @property
    def expires(self) -> int:
        """When the last record expires."""
        return self.records[-1].expires if self.records else 0

    @property
    def pins(self) -> frozenset[str]:
        """All names that it pins."""
        found = {name for record in self.records for name in record.pins}
        return frozenset(found)


def read_chains() -> Steps[list[Chain]]:
    """All chains, each read up to the highest number that the listing showed.

    A listing may show a new record and not the one before it, so every number is asked for.
    """
    highest: dict[bytes, tuple[int, float]] = {}
    for stored in (yield from list_names(f"{names.INTENTS}/")):
        writer_id, number = names.intent_parts(stored.name)
        high, modified = highest.get(writer_id, (0, 0.0))
        highest[writer_id] = max(high, number), max(modified, stored.modified_s)
    chains = []
    for writer_id, (number, modified) in sorted(highest.items()):
        chains.append((yield from _read_chain(writer_id, number + 1, modified)))
    return chains


def _read_chain(writer_id: bytes, length: int, modified_s: float) -> Steps[Chain]:
    records: list[Record] = []
    for number in range(length):
        try:
            data = yield from get(names.intent_name(writer_id, number))
            records.append(decode_record(data))
        except NotStoredError:
            return Chain(writer_id, (), length, modified_s)
        except VersionError:
            raise
        except KvpackError:
            return Chain(writer_id, (), length, modified_s, is_readable=False)
    return Chain(writer_id, tuple(records), length, modified_s)
