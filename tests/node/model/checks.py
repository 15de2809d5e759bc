"""What must be so in every world, and in every world where nothing is left to happen."""

from __future__ import annotations

from model.nodes import published
from model.sources import source_ended
from model.values import NOBODY, OPEN, TARGET_DONE, UP, Model, World, pack_content


def broken(model: Model, world: World) -> str:
    """The first promise that a world breaks; empty where it breaks none."""
    if world.wrong:
        return world.wrong
    key = world.keys[0]
    if not key.vanished:
        return _two_owners(world) or _copies(model, world) or _lost(model, world)
    return ""


def _two_owners(world: World) -> str:
    """At most one node would serve, and it owns. After an operator's force, the check fences."""
    key = world.keys[0]
    serving = [n for n, node in enumerate(world.nodes) if node.live[0] and not node.live[0].frozen]
    if world.forced:
        return ""
    if len(serving) > 1:
        return "two nodes serve"
    for number in serving:
        if key.owner != number:
            return "a node serves that does not own"
        if key.revision != world.nodes[number].live[0].revision:
            return "a node serves under a token that is not the current one"
    return ""


def _lost(model: Model, world: World) -> str:
    """The owner has, in memory or published, whatever may not be lost any more."""
    owner = world.keys[0].owner
    live = world.nodes[owner].live[0]
    if live is not None and not world.must & ~live.content:
        return ""
    for pack in published(model, world, owner):
        if not world.must & ~pack_content(world, pack):
            return ""
    if not world.must and (world.nodes[owner].lost or world.nodes[owner].phase != UP):
        return ""  # Never published: the stated loss bound.
    return "the session is lost: its owner does not have it"


def _copies(model: Model, world: World) -> str:
    for number, route in enumerate(model.scenario.routes):
        transfer = world.transfers[number]
        exists = world.keys[-1].owner == route.target and transfer.pack
        if route.session and transfer.source == "copied" and not exists:
            return "a copy that was reported does not exist"
    return ""


def unfinished(model: Model, world: World) -> str:
    """Why a world in which nothing can happen any more is no good end; empty where it is one."""
    if not source_ended(world) or any(t.target not in TARGET_DONE for t in world.transfers):
        return "a move has not ended"
    key, serving = world.keys[0], [n for n, node in enumerate(world.nodes) if node.live[0]]
    if serving != [key.owner]:
        return "not exactly the owner serves in the end"
    live = world.nodes[key.owner].live[0]
    if live is None or live.frozen or live.mover != NOBODY or live.revision != key.revision:
        return "the owner's session is stuck"
    if world.must & ~live.content:
        return "acknowledged appends are missing in the end"
    return _leftovers(model, world)


def _leftovers(model: Model, world: World) -> str:
    for number, route in enumerate(model.scenario.routes):
        transfer = world.transfers[number]
        held = number + 1 in world.nodes[route.target].held
        if transfer.pack and not held and transfer.journal != OPEN:
            return "a pack is left over that nobody holds"
    for key in world.keys[1:]:
        if key.owner != NOBODY and world.nodes[key.owner].live[1] is None:
            return "a copy's claim is left over"
    return ""
