"""Nodes and their surroundings: clients, crashes, restarts, an operator, a paused owner.

A pause needs no rule of its own. An operation checks in one step and acts in another, and any
number of steps of others may come in between.
"""

from __future__ import annotations

from collections.abc import Iterator

from model.keys import STALE, WON, swap
from model.values import (
    ABORTED,
    COMMITTED,
    DOWN,
    NAMES,
    NOBODY,
    OPEN,
    RECOVERING,
    UP,
    C,
    Live,
    Model,
    Step,
    World,
    pack_content,
    set_at,
    set_live,
    set_node,
    set_transfer,
)
from model.wires import hang_up


def node_steps(model: Model, world: World) -> Iterator[Step]:
    """Whatever nodes, their clients and an operator can do next."""
    for number, node in enumerate(world.nodes):
        if node.phase == DOWN:
            up = set_node(world, number, phase=RECOVERING)
            yield Step(f"{NAMES[number]}: restarts", False, up)
            continue
        if node.phase == RECOVERING:
            yield from _recover(model, world, number)
        else:
            yield from _serve(model, world, number)
            yield from _let_go(model, world, number)
            yield from _open(model, world, number)
            if node.blind and not world.keys[0].vanished:
                yield from _restore(model, world, number)
        yield from _crash(model, world, number)
    yield from _take_over(model, world)


# --- Clients -----------------------------------------------------------------------------------


def _serve(model: Model, world: World, number: int) -> Iterator[Step]:
    """An append: first the check that every operation begins with, then the act."""
    live, key, name = world.nodes[number].live[0], world.keys[0], NAMES[number]
    if live is None or live.frozen:
        return
    if live.armed:
        yield _act(model, world, number)
        return
    owned = key.owner == number and not key.vanished
    if owned and key.revision == live.revision:
        if world.appends:
            armed = set_live(world, number, 0, live._replace(armed=True))
            armed = armed._replace(appends=world.appends - 1)
            yield Step(f"{name}: an append passes its check under {live.revision}", False, armed)
    elif not owned and (not key.vanished or model.rules.none_is_other):
        yield Step(f"{name}: is fenced, and drops the session", False, _fenced(world, number))


def _fenced(world: World, number: int) -> World:
    held = world.nodes[number].held[0]
    world = set_live(world, number, 0, None)
    if held > 0:
        world = set_transfer(world, held - 1, pack=False)
    return set_node(world, number, held=set_at(world.nodes[number].held, 0, 0))


def _act(model: Model, world: World, number: int) -> Step:
    """The append is in the session; the client hears of it, and drops what is below its token."""
    live, key = world.nodes[number].live[0], world.keys[0]
    bit = 2 << world.acknowledged
    done = live._replace(armed=False, content=live.content | bit)
    world = set_live(world, number, 0, done)._replace(acknowledged=world.acknowledged + 1)
    name = f"{NAMES[number]}: the append under {live.revision}"
    if live.revision < world.seen and model.rules.client_compares:
        return Step(f"{name} comes too late; the client drops it", False, world)
    if live.revision < world.seen:
        return Step(f"{name} is taken", False, world._replace(wrong="output of a fenced owner"))
    current = key.owner == number and key.revision == live.revision
    world = world._replace(seen=live.revision)
    if current:
        if world.must & ~live.content:
            world = world._replace(wrong="a served session lacks acknowledged appends")
        return Step(f"{name} is acknowledged", False, world._replace(must=world.must | bit))
    if not world.forced and not key.vanished:
        world = world._replace(wrong="an append under a stale token was accepted")
    return Step(f"{name} is acknowledged", False, world)


def _open(model: Model, world: World, number: int) -> Iterator[Step]:
    """A client opens the id of session 0 at a node that owns it, but does not hold it."""
    node, key = world.nodes[number], world.keys[0]
    name = NAMES[number]
    if node.claiming:
        for written in swap(model, world, 0, node.claiming, number, 0):
            after = set_node(written.world, number, claiming=0)
            if written.outcome == WON:
                # An operator's choice: what is not here is given up.
                after = set_live(after, number, 0, Live(node.claiming + 1, 0))
                after = set_node(after, number, lost=False)
            yield Step(f"{name}: claims session 0 anew: {written.how}", written.fault, after)
        return
    mine = key.owner == number and not key.vanished and node.live[0] is None
    if mine and (node.lost or not model.rules.reopen_only_lost):
        claims = set_node(world, number, claiming=key.revision)
        yield Step(f"{name}: open() reads that session 0 is ours, but lost", False, claims)


def _let_go(model: Model, world: World, number: int) -> Iterator[Step]:
    """The second half of a release: the pack's file and its row in the journal."""
    node = world.nodes[number]
    if not node.dropping:
        return
    held = node.held
    if held[0] == node.dropping or not model.rules.let_go_by_pack:
        held = set_at(held, 0, 0)
    world = set_node(world, number, dropping=0, held=held)
    if node.dropping > 0:
        world = set_transfer(world, node.dropping - 1, pack=False)
    yield Step(f"{NAMES[number]}: lets its old pack go", False, world)


# --- Crashes and restarts ----------------------------------------------------------------------


def _crash(model: Model, world: World, number: int) -> Iterator[Step]:
    """Memory is gone; journal, published packs and, with luck, the spools stay."""
    spent = model.spend(world, "crash")
    if spent is None:
        return
    spent = _within_bound(spent, number)
    nothing = (None,) * len(world.nodes[number].live)
    spent = set_node(
        spent, number, phase=DOWN, live=nothing, lost=False, blind=False, claiming=0, dropping=0
    )
    spooled = False
    for one, route in enumerate(model.scenario.routes):
        if route.source == number and spent.transfers[one].source not in _STAY:
            spent = set_transfer(hang_up(spent, one), one, source="gone", effect="")
        if route.target == number:
            spooled = spooled or spent.transfers[one].received
            spent = set_transfer(spent, one, target="none", todo="", caller=False)
    yield Step(f"{NAMES[number]}: crashes", True, spent)
    if spooled:
        for one, route in enumerate(model.scenario.routes):
            if route.target == number:
                spent = set_transfer(spent, one, received=False)
        yield Step(f"{NAMES[number]}: crashes; its spools were not written back", True, spent)


_STAY = frozenset({"idle", "gone", "kept", "resumed", "released", "copied"})


def published(model: Model, world: World, number: int) -> Iterator[int]:
    """Published packs of session 0 on a node."""
    if world.nodes[number].held[0] < 0:
        yield world.nodes[number].held[0]
    for one, route in enumerate(model.scenario.routes):
        if route.target == number and route.session == 0 and world.transfers[one].pack:
            yield one + 1


def _within_bound(world: World, number: int) -> World:
    """The loss bound: of an owner that crashes, the last published cut survives."""
    if world.keys[0].owner != number:
        return world
    return world._replace(must=world.must & world.cut)


def _recover(model: Model, world: World, number: int) -> Iterator[Step]:
    """One step of a restart: settle an open transfer, or, at last, serve again."""
    for one, route in enumerate(model.scenario.routes):
        transfer = world.transfers[one]
        if route.target == number and transfer.journal == OPEN and transfer.target == "none":
            yield from _settle(model, world, number, one)
            return
    yield from _restore(model, world, number)


def _settle(model: Model, world: World, number: int, one: int) -> Iterator[Step]:
    route, transfer = model.scenario.routes[one], world.transfers[one]
    key, label = world.keys[route.session], f"{NAMES[number]}: {model.name(one)} "
    if key.vanished and transfer.pack and not model.rules.none_is_other:
        return  # Neither committed nor aborted: it waits for the directory.
    if key.nonce == one + 1 and not key.vanished:
        yield Step(label + "committed, says its nonce", False, _committed(world, one, route))
    elif not transfer.pack:
        yield from _not_published(model, world, one, label)
    elif not model.rules.restart_settles_by_write:
        yield Step(label + "aborted, says a read", False, _aborted(model, world, one, route))
    else:
        base = transfer.claim if route.session else transfer.token
        for written in swap(model, world, route.session, base, number, one + 1):
            after, how = written.world, f"settled by a write: {written.how}"
            ours = after.keys[route.session].nonce == one + 1
            if written.outcome == WON or (written.outcome == STALE and ours):
                after = _committed(after, one, route)
            elif written.outcome == STALE:
                after = _aborted(model, after, one, route)
            else:
                after = set_node(after, number, phase=DOWN)
            yield Step(label + how, written.fault, after)


def _not_published(model: Model, world: World, one: int, label: str) -> Iterator[Step]:
    """Without a published pack no compare-and-swap was ever sent: its spool may be taken again."""
    step = model.rules.target.get(("none", "reload"))
    if step is not None:
        again = set_transfer(world, one, target=step[0])
        yield Step(label + f"taken again from its spool, now {step[0]}", False, again)
    route = model.scenario.routes[one]
    yield Step(label + "aborted, its spool is unusable", False, _aborted(model, world, one, route))


def _committed(world: World, one: int, route) -> World:
    held = set_at(world.nodes[route.target].held, route.session, one + 1)
    world = set_node(world, route.target, held=held)
    return set_transfer(world, one, journal=COMMITTED)


def _aborted(model: Model, world: World, one: int, route) -> World:
    key, transfer = world.keys[route.session], world.transfers[one]
    held = world.nodes[route.target].held[route.session]
    if key.owner == route.target and model.rules.keep_published and transfer.pack and not held:
        # Ours under another nonce: its commit was never recorded, and the revision rose since.
        return _committed(world, one, route)
    if route.session and key.owner == route.target and key.revision == transfer.claim:
        world = world._replace(keys=set_at(world.keys, 1, key._replace(owner=NOBODY, nonce=0)))
    return set_transfer(world, one, journal=ABORTED, pack=False, received=False)


def _restore(model: Model, world: World, number: int) -> Iterator[Step]:
    """Serve what is owned and durable, under a raised revision; remove what is neither."""
    node, key, name = world.nodes[number], world.keys[0], NAMES[number]
    up = set_node(_swept(model, world, number), number, phase=UP, blind=False)
    if len(node.live) > 1 and node.held[1] and world.keys[1].owner == number:
        copied = Live(world.keys[1].revision, pack_content(world, node.held[1]))
        up = set_live(up, number, 1, copied)
    if key.vanished or key.owner != number:
        blind = bool(key.vanished and node.held[0])
        up = set_node(up, number, blind=blind)
        yield Step(f"{name}: serves again; session 0 is not its own", False, up)
    elif not _usable(world, node.held[0]):
        lost = set_node(up, number, lost=True)
        yield Step(f"{name}: serves again; session 0 is lost", False, lost)
    elif not model.rules.raise_on_restart:
        back = Live(key.revision, pack_content(world, node.held[0]))
        yield Step(f"{name}: restores session 0", False, set_live(up, number, 0, back))
    else:
        for written in swap(model, up, 0, key.revision, number, 0):
            after = written.world
            if written.outcome == WON:
                back = Live(key.revision + 1, pack_content(world, node.held[0]))
                after = set_live(after, number, 0, back)
            else:
                after = set_node(after, number, phase=DOWN)
            text = f"{name}: raises before it restores session 0: {written.how}"
            yield Step(text, written.fault, after)


def _usable(world: World, pack: int) -> bool:
    """Whether a pack that the journal names is there."""
    return pack < 0 or (pack > 0 and world.transfers[pack - 1].pack)


def _swept(model: Model, world: World, number: int) -> World:
    """Let go of the pack of a session that another owns, and of files nobody points at."""
    key, held = world.keys[0], world.nodes[number].held
    if key.vanished and not model.rules.none_is_other:
        return world
    if held[0] and (key.owner != number or key.vanished):
        world = set_node(world, number, held=set_at(held, 0, 0))
    for one, route in enumerate(model.scenario.routes):
        known = one + 1 in world.nodes[number].held
        if route.target == number and world.transfers[one].pack and not known:
            world = set_transfer(world, one, pack=False)
    return world


def _take_over(model: Model, world: World) -> Iterator[Step]:
    """An operator gives the session to C by force, and accepts what that loses."""
    spent = model.spend(world, "takeover")
    key = world.keys[0]
    if spent is None or key.vanished or key.owner == C or world.nodes[C].phase != UP:
        return
    taken = key._replace(owner=C, revision=key.revision + 1, nonce=0)
    spent = spent._replace(keys=set_at(spent.keys, 0, taken), must=0, cut=0, forced=True)
    spent = set_live(spent, C, 0, Live(taken.revision, 0))
    yield Step("operator: gives session 0 to C by force", True, spent)
