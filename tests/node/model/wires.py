"""The network: requests that are lost, doubled and overtaken; answers that never come.

Requests in flight are a bag, so any may arrive before any other. Loss and doubling are decided
when a request is sent: deciding it later gives no other runs. An answer belongs to its call, as in
gRPC: a caller that has given up never hears it.
"""

from __future__ import annotations

from collections.abc import Iterator

from model.values import NAMES, Model, Step, World, set_transfer

#: Requests in flight at once, stale ones included.
IN_FLIGHT_MAX = 4

WORDS = {"P": "Prepare", "D": "Push", "S": "Seal", "C": "Commit", "A": "Abort", "T": "Status"}


def send(model: Model, world: World, kind: str, number: int, waits: bool) -> Iterator[Step]:
    """Put a request on the way, once, twice or not at all."""
    if waits:
        world = set_transfer(world, number, call=kind, answer="")
    sent = _added(world, (kind, number, waits))
    yield Step("", False, sent)
    spent = model.spend(world, "loss")
    if spent is not None:
        yield Step(f"; {WORDS[kind]} is lost", True, spent)
    spent = model.spend(sent, "double")
    if spent is not None and len(sent.net) < IN_FLIGHT_MAX:
        yield Step(f"; {WORDS[kind]} is doubled", True, _added(spent, (kind, number, False)))


def _added(world: World, request: tuple[str, int, bool]) -> World:
    return world._replace(net=tuple(sorted((*world.net, request))))


def without(world: World, request: tuple[str, int, bool]) -> World:
    net = list(world.net)
    net.remove(request)
    return world._replace(net=tuple(net))


def hang_up(world: World, number: int) -> World:
    """Nobody waits any more for an answer about this transfer."""
    net = tuple(sorted((kind, one, waits and one != number) for kind, one, waits in world.net))
    return set_transfer(world._replace(net=net), number, call="", answer="", caller=False)


def answer_comes(world: World, number: int) -> bool:
    """Whether an answer is there, or may still come without a fault."""
    transfer = world.transfers[number]
    if transfer.answer or transfer.caller:
        return True
    return any(one == number and waits for _, one, waits in world.net)


def answer(world: World, number: int, waits: bool, text: str) -> World:
    """Give the caller its answer, if one still waits."""
    return set_transfer(world, number, answer=text) if waits else world


def lying_steps(model: Model, world: World) -> Iterator[Step]:
    """A target that says it committed, and did not; a source that aborts out of turn."""
    spent = model.spend(world, "stray")
    for number, transfer in enumerate(world.transfers):
        if spent is not None and transfer.token and len(spent.net) < IN_FLIGHT_MAX:
            yield Step(f"a stray Abort of {model.name(number)}", True,
                       _added(spent, ("A", number, False)))  # fmt: skip
    for request in set(world.net):
        kind, number, waits = request
        if kind == "C" and waits and (spent := model.spend(world, "lie")) is not None:
            lied = set_transfer(without(spent, request), number, answer="ok")
            target = NAMES[model.scenario.routes[number].target]
            yield Step(f"{target}: lies that it committed {model.name(number)}", True, lied)
