"""Run several protocols against one store, one operation at a time, in every order there is.

A protocol is a generator of operations, so what it does next depends only on the results that it
got so far. A state of the whole is the store's content and each actor's results; equal states have
equal futures, so each is entered once. That makes all interleavings a graph that can be walked
whole, where a list of them could not be written down.

An actor is a sequence of such protocols. Each gets what the one before returned, and nothing else:
then everything that was read on the way there is forgotten, and far fewer states differ.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpack.errors import KvpackError
from kvpack.store.errors import ConflictError, NotStoredError
from kvpack.store.interface import StoredObject
from kvpack.store.steps import Delete, Get, ListAll, Operation, Pause, Put, Stat

Content = Mapping[str, bytes]
Phase = Callable[[Any], Generator[Operation, Any, Any]]
Actor = Sequence[Phase]


@dataclass(frozen=True)
class Ended:
    """How a protocol ended."""

    result: object = None
    error: str = ""


def act(content: dict[str, bytes], operation: Operation) -> object:
    """Do ``operation`` on ``content``; an error is returned, not raised."""
    if isinstance(operation, Put):
        created = []
        for item in operation.objects:
            if content.get(item.name, item.data) != item.data:
                return ConflictError(item.name)
            created.append(item.name not in content)
            content[item.name] = item.data
        return tuple(created)
    if isinstance(operation, Get):
        return content.get(operation.name) or NotStoredError(operation.name)
    if isinstance(operation, Stat):
        return tuple(
            StoredObject(name, len(content[name]), 0.0) if name in content else None
            for name in operation.names
        )
    if isinstance(operation, ListAll):
        found = sorted(name for name in content if name.startswith(operation.prefix))
        return tuple(StoredObject(name, len(content[name]), 0.0) for name in found)
    if isinstance(operation, Delete):
        return sum(content.pop(name, None) is not None for name in operation.names)
    assert isinstance(operation, Pause)
    return None


@dataclass(frozen=True)
class Place:
    """How far one actor is: in which phase, begun with what, after which results."""

    phase: int
    carry: Any
    results: tuple[Any, ...] = ()


class Track:
    """All places that one actor can be in, numbered, and what it does next at each."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._places: list[Place] = []
        self._next: list[Operation | Ended] = []
        self._numbers: dict[Any, int] = {}
        self.first = self._enter(Place(0, None), "first")

    def step(self, number: int) -> Operation | Ended:
        """What the actor does next."""
        return self._next[number]

    def after(self, number: int, result: object) -> int:
        """Where it is after ``result``."""
        shown = (type(result), str(result)) if isinstance(result, KvpackError) else result
        known = self._numbers.get((number, shown))
        if known is None:
            place = self._places[number]
            moved = Place(place.phase, place.carry, (*place.results, result))
            known = self._numbers[number, shown] = self._enter(moved, (number, shown))
        return known

    def _enter(self, place: Place, key: Any) -> int:
        step = self._run(place)
        if isinstance(step, Ended) and not step.error and place.phase + 1 < len(self._actor):
            following = Place(place.phase + 1, step.result)
            key = (following.phase, following.carry, "begins")
            if key not in self._numbers:
                self._numbers[key] = self._enter(following, key)
            return self._numbers[key]
        self._places.append(place)
        self._next.append(step)
        return len(self._places) - 1

    def _run(self, place: Place) -> Operation | Ended:
        """Run the phase once more up to ``place``."""
        protocol = self._actor[place.phase](place.carry)
        try:
            operation = next(protocol)
            for result in place.results:
                if isinstance(result, KvpackError):
                    operation = protocol.throw(result)
                else:
                    operation = protocol.send(result)
        except StopIteration as stop:
            return Ended(result=stop.value)
        except KvpackError as error:
            return Ended(error=type(error).__name__)
        return operation


def explore(
    start: Content,
    actors: Mapping[str, Actor],
    require: Callable[[Content], None],
    require_end: Callable[[Content, Mapping[str, Ended]], None],
) -> int:
    """Walk all states that ``actors`` can reach from ``start``; returns how many there are.

    Args:
        start: The store's content.
        actors: Who acts, by name.
        require: Called once for each content that is reached.
        require_end: Called once for each state in which everybody has ended.
    """
    tracks = [Track(actor) for actor in actors.values()]
    contents: dict[frozenset[tuple[str, bytes]], int] = {}
    content_of: list[dict[str, bytes]] = []

    def number_of(content: dict[str, bytes]) -> int:
        key = frozenset(content.items())
        if key not in contents:
            require(content)
            contents[key] = len(content_of)
            content_of.append(content)
        return contents[key]

    first = (number_of(dict(start)), tuple(track.first for track in tracks))
    seen, waiting = {first}, [first]
    while waiting:
        number, places = waiting.pop()
        steps = [track.step(place) for track, place in zip(tracks, places, strict=True)]
        if all(isinstance(step, Ended) for step in steps):
            require_end(content_of[number], dict(zip(actors, steps, strict=True)))  # type: ignore[arg-type]
        for actor, step in enumerate(steps):
            if isinstance(step, Ended):
                continue
            content = dict(content_of[number])
            result = act(content, step)
            moved = tracks[actor].after(places[actor], result)
            state = (number_of(content), (*places[:actor], moved, *places[actor + 1 :]))
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    return len(seen)
