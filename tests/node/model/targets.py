"""The taking end: performs the effects of the TARGET table as the driver does."""

from __future__ import annotations

from collections.abc import Iterator

from model.keys import STALE, WON, swap
from model.values import (
    ABORTED,
    COMMITTED,
    NAMES,
    NOBODY,
    OPEN,
    UNKNOWN,
    UP,
    Key,
    Live,
    Model,
    Step,
    World,
    set_at,
    set_live,
    set_node,
    set_transfer,
)
from model.wires import WORDS, answer, without


def target_steps(model: Model, world: World) -> Iterator[Step]:
    """Whatever the taking ends can do next."""
    for request in set(world.net):
        kind, number, waits = request
        # Who performs an effect holds the transfer's lock; Status needs none.
        free = not world.transfers[number].todo or kind == "T"
        if free and world.nodes[model.scenario.routes[number].target].phase == UP:
            yield from _deliver(model, without(world, request), kind, number, waits)
    for number, route in enumerate(model.scenario.routes):
        transfer = world.transfers[number]
        if world.nodes[route.target].phase != UP or transfer.target == "none":
            continue
        if transfer.todo:
            yield from _todo(model, world, number)
        elif not _waits_for_entry(model, world, number):
            yield from _on(model, world, number, "lease_over", False)


def _waits_for_entry(model: Model, world: World, number: int) -> bool:
    """An unsettled transfer is not asked for again and again while the directory knows nothing."""
    vanished = world.keys[model.scenario.routes[number].session].vanished
    return vanished and world.transfers[number].target == "unsettled"


def _on(
    model: Model, world: World, number: int, event: str, waits: bool, why: str = ""
) -> Iterator[Step]:
    """Let ``event`` happen by the table; a pair that is not in it is refused."""
    transfer = world.transfers[number]
    step = model.rules.target.get((transfer.target, event))
    node = NAMES[model.scenario.routes[number].target]
    if step is None:
        if event != "lease_over":
            label = f"{node}: {model.name(number)} refuses {event} in {transfer.target}"
            yield Step(label, False, answer(world, number, waits, "no"))
        return
    world = set_transfer(world, number, target=step[0])
    label = f"{node}: {model.name(number)} {why or event}, now {step[0]}"
    yield Step(label, False, _begin(world, number, step[1], waits))


def _begin(world: World, number: int, effect: str, waits: bool) -> World:
    if effect == "answer":
        return answer(world, number, waits, _words(world, number))
    if effect == "receive":
        return answer(set_transfer(world, number, received=True), number, waits, "ok")
    if effect == "reserve":
        return answer(world, number, waits, _words(world, number))
    return set_transfer(world, number, todo=effect, caller=waits)


def _words(world: World, number: int) -> str:
    """What a call hears of where the transfer stands."""
    transfer = world.transfers[number]
    if transfer.target in ("unsettled", "aborted"):
        return "no"
    if transfer.target in ("open", "sealed"):
        return "ok+held" if transfer.received else "ok"
    return "ok"


def _deliver(model: Model, world: World, kind: str, number: int, waits: bool) -> Iterator[Step]:
    transfer = world.transfers[number]
    if kind == "P":
        yield from _prepare(model, world, number, waits)
    elif kind == "T":
        yield _status(model, world, number, waits)
    elif transfer.target == "none":
        node = NAMES[model.scenario.routes[number].target]
        text = f"{node}: {WORDS[kind]} of {model.name(number)}: unknown here"
        yield Step(text, False, answer(world, number, waits, "unknown"))
    elif kind == "D":
        yield from _push(model, world, number, waits)
    elif kind == "S":
        yield from _seal(model, world, number, waits)
    else:
        event = {"C": "commit", "A": "abort"}[kind]
        yield from _on(model, world, number, event, waits)


def _status(model: Model, world: World, number: int, waits: bool) -> Step:
    journal = world.transfers[number].journal
    text = {COMMITTED: "committed", ABORTED: "aborted"}.get(journal, "silent")
    label = f"{NAMES[model.scenario.routes[number].target]}: Status says {text}"
    return Step(label, False, answer(world, number, waits, text))


def _prepare(model: Model, world: World, number: int, waits: bool) -> Iterator[Step]:
    route, transfer = model.scenario.routes[number], world.transfers[number]
    node, key = NAMES[route.target], world.keys[0]
    if transfer.target != "none":
        yield from _on(model, world, number, "prepare_again", waits)
        return
    expected = (route.source, transfer.token, False)
    unowned = (key.owner, key.revision, key.vanished) != expected
    lives = world.nodes[route.target].live[route.session] is not None
    taken = route.session and transfer.journal == UNKNOWN and world.keys[1].owner != NOBODY
    if transfer.journal in (COMMITTED, ABORTED) or unowned or lives or taken:
        label = f"{node}: refuses Prepare of {model.name(number)}"
        yield Step(label, False, answer(world, number, waits, "no"))
        return
    world = _supersede(model, world, number)
    if route.session and transfer.journal == UNKNOWN:
        revision = world.keys[1].revision + 1
        claimed = Key(route.target, revision, 100 + number)
        world = world._replace(keys=set_at(world.keys, 1, claimed))
        world = set_transfer(world, number, claim=revision)
    event = "reload" if transfer.journal == OPEN else "prepare"
    yield from _on(model, set_transfer(world, number, journal=OPEN), number, event, waits)


def _supersede(model: Model, world: World, number: int) -> World:
    """The source offers the session anew: its older transfers here can never be sealed."""
    new = model.scenario.routes[number]
    for other, route in enumerate(model.scenario.routes):
        here = world.transfers[other]
        if other == number or route != new or here.todo:
            continue
        step = model.rules.target.get((here.target, "superseded"))
        if step is not None:
            world = set_transfer(world, other, target=step[0], todo=step[1], caller=False)
    return world


def _push(model: Model, world: World, number: int, waits: bool) -> Iterator[Step]:
    transfer = world.transfers[number]
    if transfer.received and transfer.target == "open":
        # A late stream brings chunks that are here already.
        yield from _bad(model, world, number, "piece_bad", waits)
        return
    yield from _on(model, world, number, "piece", waits)
    spent = model.spend(world, "bad")
    if spent is not None and transfer.target == "open":
        for step in _bad(model, spent, number, "piece_bad", waits):
            yield step._replace(fault=True)


def _seal(model: Model, world: World, number: int, waits: bool) -> Iterator[Step]:
    transfer = world.transfers[number]
    if transfer.target == "open" and not transfer.received:
        yield from _bad(model, world, number, "seal_bad", waits)
        return
    yield from _on(model, world, number, "seal", waits)


def _bad(model: Model, world: World, number: int, event: str, waits: bool) -> Iterator[Step]:
    yield from _on(model, world, number, event, waits)


def _todo(model: Model, world: World, number: int) -> Iterator[Step]:
    todo = world.transfers[number].todo
    if todo == "discard":
        yield from _discard(model, world, number)
    elif todo == "swap":
        yield _swap(model, world, number)
    elif todo == "record":
        yield from _record(model, world, number)
    elif todo == "probe":
        yield from _may_fail(model, world, number, "probe_good", "probe_bad")
    elif todo == "publish":
        published = set_transfer(world, number, pack=True)
        if not world.transfers[number].received:
            published = published._replace(wrong="a pack was published that lacks chunks")
        for step in _may_fail(model, published, number, "published", "publish_failed"):
            failed = step.fault and set_transfer(step.world, number, pack=False)
            yield step._replace(world=failed or step.world)
    elif todo == "settle":
        yield from _settle(model, world, number)
    else:
        yield from _transfer(model, world, number)


def _next(model: Model, world: World, number: int, event: str, why: str = "") -> Iterator[Step]:
    """Feed back the event that an effect came to; the caller goes on waiting."""
    waits = world.transfers[number].caller
    done = set_transfer(world, number, todo="", caller=False)
    yield from _on(model, done, number, event, waits, why)


def _may_fail(model: Model, world: World, number: int, good: str, bad: str) -> Iterator[Step]:
    yield from _next(model, world, number, good)
    spent = model.spend(world, "bad")
    if spent is not None:
        for step in _next(model, spent, number, bad):
            yield step._replace(fault=True)


def _settle(model: Model, world: World, number: int) -> Iterator[Step]:
    """Read by nonce; where it is not there, the write is tried again in a step of its own."""
    key = world.keys[model.scenario.routes[number].session]
    if key.vanished and not model.rules.none_is_other:
        yield from _next(model, world, number, "cas_unknown", "reads: nobody")
    elif key.nonce == number + 1 and not key.vanished:
        yield from _next(model, world, number, "cas_won", "finds its nonce")
    else:
        node = NAMES[model.scenario.routes[number].target]
        write = set_transfer(world, number, todo="write")
        yield Step(f"{node}: {model.name(number)} does not find its nonce", False, write)
    spent = model.spend(world, "directory")
    if spent is not None:
        for step in _next(model, spent, number, "cas_unknown", "cannot read"):
            yield step._replace(fault=True)


def _transfer(model: Model, world: World, number: int) -> Iterator[Step]:
    route, transfer = model.scenario.routes[number], world.transfers[number]
    revision = transfer.claim if route.session else transfer.token
    for written in swap(model, world, route.session, revision, route.target, number + 1):
        event = {WON: "cas_won", STALE: "cas_lost"}.get(written.outcome, "cas_unknown")
        key = written.world.keys[route.session]
        ours = key.nonce == number + 1 and not key.vanished
        if event == "cas_lost" and ours and model.rules.reread_when_stale:
            event = "cas_won"
        elif event == "cas_lost" and key.vanished and not model.rules.none_is_other:
            event = "cas_unknown"  # "Nobody owns it" does not say that our write never was.
        for step in _next(model, written.world, number, event, f"swaps: {written.how}"):
            yield step._replace(fault=written.fault or step.fault)


def _swap(model: Model, world: World, number: int) -> Step:
    """The generation becomes the session's; the journal is written in a step of its own."""
    route, transfer = model.scenario.routes[number], world.transfers[number]
    # The token is the reply's, not whatever stands there by now.
    revision = 1 + (transfer.claim if route.session else transfer.token)
    world = set_live(world, route.target, route.session, Live(revision, transfer.content))
    label = f"{NAMES[route.target]}: {model.name(number)} swapped in, revision {revision}"
    return Step(label, False, set_transfer(world, number, todo="record"))


def _record(model: Model, world: World, number: int) -> Iterator[Step]:
    route, transfer = model.scenario.routes[number], world.transfers[number]
    label = f"{NAMES[route.target]}: {model.name(number)} recorded as committed"
    held = set_at(world.nodes[route.target].held, route.session, number + 1)
    done = set_transfer(world, number, todo="", caller=False)
    done = answer(done, number, transfer.caller, "ok")
    recorded = set_node(set_transfer(done, number, journal=COMMITTED), route.target, held=held)
    yield Step(label, False, recorded)
    spent = model.spend(done, "journal")
    if spent is not None:
        yield Step(f"{label}: the journal's disk refuses", True, spent)


def _discard(model: Model, world: World, number: int) -> Iterator[Step]:
    """Free everything; a copy gives its claim back."""
    route, transfer = model.scenario.routes[number], world.transfers[number]
    done = set_transfer(world, number, todo="", caller=False, received=False, pack=False)
    done = answer(done, number, transfer.caller, "no")
    key = done.keys[route.session]
    if route.session and key.owner == route.target and key.revision == transfer.claim:
        given_back = Key(NOBODY, key.revision, 0)
        done = done._replace(keys=set_at(done.keys, route.session, given_back))
    label = f"{NAMES[route.target]}: {model.name(number)} is discarded"
    yield Step(label, False, set_transfer(done, number, journal=ABORTED))
    spent = model.spend(done, "journal")
    if spent is not None:
        yield Step(f"{label}: the journal's disk refuses", True, spent)
