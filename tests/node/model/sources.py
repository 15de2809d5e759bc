"""The giving end: performs the effects of the SOURCE and COPY tables as the driver does."""

from __future__ import annotations

from collections.abc import Iterator

from model.keys import AWAY, STALE, WON, swap
from model.values import (
    NAMES,
    NOBODY,
    SOURCE_DONE,
    UP,
    Live,
    Model,
    Step,
    World,
    set_live,
    set_node,
    set_transfer,
)
from model.wires import answer_comes, hang_up, send

#: What an answer to a call, or its absence, may be taken for.
ANSWERS = {
    "P": {"ok": ("prepared",), "no": ("prepare_failed",), "": ("prepare_cut", "prepare_failed")},
    "D": {"ok": ("pushed",), "no": ("push_failed",), "unknown": ("push_cut", "push_failed"),
          "": ("push_cut", "push_failed")},
    "S": {"ok": ("sealed",), "no": ("seal_failed",), "unknown": ("seal_cut", "seal_failed"),
          "": ("seal_cut", "seal_failed")},
    "C": {"ok": ("commit_answered",), "no": ("commit_failed",), "unknown": ("commit_failed",),
          "": ("commit_failed",)},
    "T": {"committed": ("target_committed",), "aborted": ("target_aborted",),
          "silent": ("target_silent",), "": ("target_silent",)},
}  # fmt: skip


def source_steps(model: Model, world: World) -> Iterator[Step]:
    """Whatever the giving ends can do next."""
    for number, route in enumerate(model.scenario.routes):
        if world.nodes[route.source].phase != UP:
            continue
        transfer = world.transfers[number]
        if transfer.source == "idle":
            yield from _start(model, world, number)
        elif transfer.call:
            yield from _called(model, world, number)
        elif transfer.effect in ("read_owner", "wait"):
            yield from _read_owner(model, world, number)
        elif transfer.effect == "raise":
            yield from _raise(model, world, number)


def _live(model: Model, world: World, number: int) -> Live | None:
    # A copy gives session 0, too; its target claims session 1.
    return world.nodes[model.scenario.routes[number].source].live[0]


def _start(model: Model, world: World, number: int) -> Iterator[Step]:
    route = model.scenario.routes[number]
    live = _live(model, world, number)
    if live is None or live.frozen or live.armed or live.mover != NOBODY:
        return
    world = set_live(world, route.source, 0, live._replace(mover=number))
    world = set_transfer(world, number, token=live.revision)
    yield from fire(model, world, number, "start", "begins")


def fire(model: Model, world: World, number: int, event: str, why: str) -> Iterator[Step]:
    """Let ``event`` happen by the table, and begin the effect that it calls for."""
    route, transfer = model.scenario.routes[number], world.transfers[number]
    table = model.rules.copy if route.session else model.rules.source
    step = table.get((transfer.source, event))
    if step is None:
        return
    live = _live(model, world, number)
    if step[1] == "seal" and live is not None and live.armed:
        return  # The freeze waits for the operation under way.
    world = set_transfer(world, number, source=step[0], effect="")
    label = f"{NAMES[route.source]}: {model.name(number)} {why} ({event}), now {step[0]}"
    for after in _perform(model, world, number, step[1]):
        yield Step(label + after.label, after.fault, after.world)


def _perform(model: Model, world: World, number: int, effect: str) -> Iterator[Step]:
    requests = {"prepare": "P", "seal": "S", "commit": "C", "ask_status": "T"}
    if effect == "stream":
        if world.transfers[number].held:
            # Nothing is left to be sent: the stream is not opened.
            yield from fire(model, world, number, "pushed", "; nothing to push")
            return
        yield from send(model, world, "D", number, True)
        return
    if effect == "seal":
        world = _freeze(model, world, number)
    if effect in requests:
        yield from send(model, world, requests[effect], number, True)
    elif effect in ("read_owner", "wait", "raise"):
        yield Step("", False, set_transfer(world, number, effect=effect))
    elif effect == "release":
        yield Step("", False, _release(model, world, number))
    elif effect in ("abort", "thaw"):
        yield from send(model, _let_serve(model, world, number, effect), "A", number, False)
    else:
        yield Step("", False, _let_serve(model, world, number, effect))


def _freeze(model: Model, world: World, number: int) -> World:
    live = _live(model, world, number)
    if live is None:
        return world
    if world.transfers[number].content != live.content:
        world = set_transfer(world, number, content=live.content)
    if model.scenario.routes[number].session:
        return world  # A copy freezes nothing.
    return set_live(world, model.scenario.routes[number].source, 0, live._replace(frozen=True))


def _let_serve(model: Model, world: World, number: int, effect: str) -> World:
    live = _live(model, world, number)
    if live is None or live.mover != number:
        return world
    live = live._replace(mover=NOBODY)
    if effect == "thaw":
        live = live._replace(frozen=False, revision=world.transfers[number].read)
    return set_live(world, model.scenario.routes[number].source, 0, live)


def _release(model: Model, world: World, number: int) -> World:
    """Drop the session at once; its row in the journal goes in a step of its own."""
    source = model.scenario.routes[number].source
    held = world.nodes[source].held[0]
    return set_node(set_live(world, source, 0, None), source, dropping=held)


def _called(model: Model, world: World, number: int) -> Iterator[Step]:
    transfer = world.transfers[number]
    meanings = ANSWERS[transfer.call]
    if transfer.answer:
        got, _, held = transfer.answer.partition("+")
        heard = hang_up(world, number)
        if transfer.call == "P":
            heard = set_transfer(heard, number, held=bool(held))
        for event in meanings[got]:
            yield from fire(model, heard, number, event, f"is answered: {transfer.answer}")
        return
    comes = answer_comes(world, number)
    given_up = model.spend(world, "timeout") if comes else world
    if given_up is not None:
        for event in meanings[""]:
            for step in fire(model, hang_up(given_up, number), number, event, "gets no answer"):
                yield step._replace(fault=comes or step.fault)


def _read_owner(model: Model, world: World, number: int) -> Iterator[Step]:
    key, source = world.keys[0], model.scenario.routes[number].source
    if key.vanished and not model.rules.none_is_other:
        yield from fire(model, world, number, "directory_down", "reads: nobody")
    elif key.vanished or key.owner != source:
        yield from fire(model, world, number, "owner_other", "reads: another owner")
    else:
        read = set_transfer(world, number, read=key.revision)
        yield from fire(model, read, number, "owner_self", f"reads: owner, {key.revision}")
    spent = model.spend(world, "directory")
    if spent is not None:
        for step in fire(model, spent, number, "directory_down", "cannot read"):
            yield step._replace(fault=True)


def _raise(model: Model, world: World, number: int) -> Iterator[Step]:
    source, read = model.scenario.routes[number].source, world.transfers[number].read
    events = {WON: "raised", STALE: "raise_lost", AWAY: "directory_down"}
    for written in swap(model, world, 0, read, source, 0):
        after = written.world
        if written.outcome == WON:
            after = set_transfer(after, number, read=read + 1)
        for step in fire(model, after, number, events[written.outcome], f"raises: {written.how}"):
            yield step._replace(fault=written.fault or step.fault)


def source_ended(world: World) -> bool:
    """Whether no giving end has anything left to do."""
    return all(transfer.source in SOURCE_DONE for transfer in world.transfers)
