"""Protocols of the store as generators of operations: no I/O, no clock, no waiting inside.

A writer and a collector are written as :data:`Steps`: they yield one operation, get its result, and
go on. :func:`drive` runs them against a store. A test runs two writers and a collector against one
another, operation by operation, in every order there is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from kvpack.errors import KvpackError
from kvpack.store.interface import ObjectData, ObjectStore, StoredObject, list_all


@dataclass(frozen=True, slots=True)
class Put:
    """``put_if_absent``; gives a tuple of bool."""

    objects: tuple[ObjectData, ...]


@dataclass(frozen=True, slots=True)
class Get:
    """``get``; gives bytes."""

    name: str
    offset: int = 0
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Stat:
    """``stat``; gives a tuple of StoredObject or None."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListAll:
    """``list``, all pages; gives a list of StoredObject."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Delete:
    """``delete``; gives how many there were."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """Let others work for a moment; gives None."""


Operation: TypeAlias = Put | Get | Stat | ListAll | Delete | Pause

_Result = TypeVar("_Result")
Steps: TypeAlias = Generator[Operation, Any, _Result]


def drive(store: ObjectStore, steps: Steps[_Result], pause: Callable[[], None]) -> _Result:
    """Run ``steps`` to their end. An error of the store is raised where the operation stands.

    Args:
        store: Where the operations go.
        steps: The protocol.
        pause: Called for :class:`Pause`.

    Raises:
        KvpackError: What the protocol raises.
    """
    try:
        operation = next(steps)
        while True:
            try:
                result = perform(store, operation, pause)
            except KvpackError as error:
                operation = steps.throw(error)
            else:
                operation = steps.send(result)
    except StopIteration as stop:
        return cast(_Result, stop.value)


def perform(store: ObjectStore, operation: Operation, pause: Callable[[], None]) -> object:
    """Do one operation.

    Raises:
        KvpackError: What the store raises.
    """
    if isinstance(operation, Put):
        return store.put_if_absent(operation.objects)
    if isinstance(operation, Get):
        return store.get(operation.name, operation.offset, operation.length)
    if isinstance(operation, Stat):
        return store.stat(operation.names)
    if isinstance(operation, ListAll):
        return list_all(store, operation.prefix)
    if isinstance(operation, Delete):
        return store.delete(operation.names)
    pause()
    return None


def put(objects: Iterable[ObjectData]) -> Steps[tuple[bool, ...]]:
    """Put ``objects`` if there are any."""
    batch = tuple(objects)
    return cast("tuple[bool, ...]", (yield Put(batch))) if batch else ()


def get(name: str, offset: int = 0, length: int | None = None) -> Steps[bytes]:
    """Bytes of one object."""
    return cast(bytes, (yield Get(name, offset, length)))


def stat(names: Sequence[str]) -> Steps[tuple[StoredObject | None, ...]]:
    """What is known of ``names``, if there are any."""
    if not names:
        return ()
    return cast("tuple[StoredObject | None, ...]", (yield Stat(tuple(names))))


def list_names(prefix: str) -> Steps[list[StoredObject]]:
    """All objects under ``prefix``."""
    return cast("list[StoredObject]", (yield ListAll(prefix)))


def delete(names: Iterable[str], batch_names: int) -> Steps[int]:
    """Delete ``names`` in the order given, ``batch_names`` at a time."""
    ordered, count = tuple(names), 0
    for first in range(0, len(ordered), batch_names):
        count += cast(int, (yield Delete(ordered[first : first + batch_names])))
    return count


def pause() -> Steps[None]:
    """Let others work."""
    yield Pause()
