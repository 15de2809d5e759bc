"""What must be so when a run has come to rest."""

from __future__ import annotations

import dataclasses

from kvpack.errors import KvpackError
from model.sim_node import SESSION, SimNode
from node.directory import Ownership


class Broken(Exception):
    """A run that broke a promise."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a run came to."""

    owner: str
    moves: int
    moved: int
    crashes: int
    faults: int
    lost: bool


async def check(sim, clients) -> Ended:
    """Say what a run came to.

    Raises:
        Broken: It broke a promise; the message names the seed and every fault of the run.
    """
    if any(not client.done() for client in clients):
        sim.broken.append("a client or a move has not ended")
    if any(fault.startswith("vanish") for fault in sim.faults):
        await _start_again(sim)
    owner, holders, lost = sim.owner_now(), sim.holders(), False
    if holders == [owner]:
        try:
            await sim.ask(sim.nodes[owner], 3)
        except KvpackError as error:
            sim.broken.append(f"the owner {owner} does not serve: {error}")
    elif not holders and sim.must == 0:
        lost = True  # never published: the stated loss bound
    else:
        sim.broken.append(f"owner {owner}, held by {holders}, {sim.must} tokens promised")
    for copy_id, target in sim.copies.items():
        await _check_copy(sim, copy_id, target)
    await _check_leftovers(sim)
    if sim.broken:
        raise Broken(f"seed {sim.seed}: {'; '.join(sim.broken)}; faults: {sim.faults}")
    return Ended(owner, sim.moves, sim.moved, sim.crashes, len(sim.faults), lost)


async def _start_again(sim) -> None:
    """Start what was started while the directory did not know the session: it kept all it had."""
    for node in sim.nodes.values():
        idle = node.name == sim.owner_now() and not sim.holders()
        if node.up and (idle or _left_over(node)):
            node.stop()
            await node.start()


def _left_over(node: SimNode) -> list[str]:
    """Names in the spool that no session of the node came in."""
    sessions, _ = node.sessions.page("", 9)
    known = {session.spool.name for session in sessions if session.spool is not None}
    return sorted({path.name for path in node.spool.iterdir()} - known)


async def _check_copy(sim, copy_id: str, target: str) -> None:
    """A copy that was reported is there; one that was not is there whole, or not claimed."""
    entry = await sim.directory.owner(copy_id)
    if not isinstance(entry, Ownership):
        if target:
            sim.broken.append(f"{copy_id} was reported, and nobody owns it")
        return
    node = sim.nodes[entry.node]
    if copy_id not in node.sessions:
        await _check_claim(sim, node, copy_id, target)
        return
    session = await sim.within(node, node.sessions.find(copy_id))
    known, first = list(session.token_ids), sim.length
    expected = [sim.twin.token(first, index)[0] for index in range(first, len(known))]
    decoded = session.decode_next()
    bits = sim.twin.token(first, decoded.index)
    if known != sim.twin.prompt(first) + expected or bits[1] != decoded.logits.digest():
        sim.broken.append(f"{copy_id}: wrong bits")


async def _check_claim(sim, node: SimNode, copy_id: str, target: str) -> None:
    """A claim that no directory took back is a name without a session: it can be opened."""
    if target or not {"away", "reply", "late write"} & {
        fault.split(":")[0] for fault in sim.faults
    }:
        sim.broken.append(f"{copy_id} is claimed by {node.name}, which does not have it")
        return
    node.stop()
    await node.start()
    try:
        await sim.within(node, node.sessions.open(copy_id))
    except KvpackError as error:
        sim.broken.append(f"{copy_id} is claimed by {node.name}, and cannot be opened: {error}")


async def _check_leftovers(sim) -> None:
    for node in sim.nodes.values():
        if not node.up:
            sim.broken.append(f"{node.name} is not up in the end")
            continue
        if node.transfers.open_offers():
            sim.broken.append(f"{node.name} has an open transfer in the end")
        if left := _left_over(node):
            sim.broken.append(f"{node.name} has left over {left}")
    entry = await sim.directory.owner(SESSION)
    if not isinstance(entry, Ownership):
        sim.broken.append("nobody owns the session in the end")
