"""The directory: reads, compare-and-swaps that fail, are lost, arrive late or twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from model.values import Key, Model, Step, World, set_at

WON, STALE, AWAY = "won", "stale", "unknown"


class Written(NamedTuple):
    """How a compare-and-swap went: what the caller is told, and what became of the world."""

    outcome: str
    how: str
    fault: bool
    world: World


def apply(
    model: Model, world: World, session: int, revision: int, owner: int, nonce: int
) -> World | None:
    """The directory's own step; None where ``revision`` is not the current one."""
    key = world.keys[session]
    if key.vanished or (key.revision != revision and model.rules.compare_token):
        return None
    new = Key(owner, key.revision + 1, nonce)
    # A commit publishes: what moved cannot be lost with memory any more.
    cut = world.transfers[nonce - 1].content if nonce and not session else world.cut
    return world._replace(keys=set_at(world.keys, session, new), cut=cut)


def swap(
    model: Model, world: World, session: int, revision: int, owner: int, nonce: int
) -> Iterator[Written]:
    """Every way in which a compare-and-swap can end for its caller."""
    done = apply(model, world, session, revision, owner, nonce)
    if done is None:
        yield Written(STALE, "it is stale", False, world)
    else:
        yield Written(WON, "it wins", False, done)
    spent = model.spend(world, "directory")
    if spent is not None:
        yield Written(AWAY, "the directory is away", True, spent)
    spent = model.spend(world, "late")
    if spent is not None:
        write = (session, revision, owner, nonce, len(world.late))
        late = tuple(sorted((*world.late, write)))
        yield Written(AWAY, "no reply; the write is still under way", True,
                      spent._replace(late=late))  # fmt: skip
    spent = model.spend(world, "reply")
    if spent is not None and done is not None:
        spent = done._replace(faults=spent.faults)
        yield Written(AWAY, "it wins, but the reply is lost", True, spent)
        yield Written(STALE, "it wins, is sent twice, and the second reply says stale", True, spent)


def late_steps(model: Model, world: World) -> Iterator[Step]:
    """A write that was under way reaches the directory."""
    for place, (session, revision, owner, nonce, _) in enumerate(world.late):
        rest = world._replace(late=(*world.late[:place], *world.late[place + 1 :]))
        done = apply(model, rest, session, revision, owner, nonce)
        how = "is stale" if done is None else "wins"
        yield Step(f"directory: a late write from revision {revision} {how}", False, done or rest)


def directory_steps(model: Model, world: World) -> Iterator[Step]:
    """The directory loses an entry, or finds it again."""
    key = world.keys[0]
    if key.vanished:
        back = world._replace(keys=set_at(world.keys, 0, key._replace(vanished=False)))
        yield Step("directory: the entry is back", False, back)
        return
    spent = model.spend(world, "vanish")
    if spent is not None:
        gone = spent._replace(keys=set_at(world.keys, 0, key._replace(vanished=True)))
        yield Step("directory: the entry vanished", True, gone)
