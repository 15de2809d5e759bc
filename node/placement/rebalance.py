"""``kvnode rebalance``: a few sessions move so that the nodes around are about equally full."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvpack import limits
from kvpack.errors import KvpackError
from node.client import NodeClient
from node.config import Address
from node.errors import CredentialsError, PeerAnswerError, PeerUnavailableError
from node.pb.v1 import session_pb2 as pb
from node.placement.balancing import STEPS_MAX, plan_rebalance
from node.placement.moving import fleet_of, held_by, move_one
from node.placement.values import NodeState, Plan, SessionLoad, Step


@dataclass(frozen=True, slots=True)
class RebalanceOrder:
    """Options of ``kvnode rebalance``.

    Attributes:
        node: The node that is asked which others there are.
        address: Where it listens.
        credentials_dir: A client's; only nodes that are pinned in it take part.
        accept_compatible: Continuations that are not bit-exact will do.
        dry_run: Only say what would be done.
        steps_max: Moves at most, 1 to 256.

    Raises:
        LimitError: ``steps_max`` is outside its range.
    """

    node: str
    address: Address
    credentials_dir: Path
    accept_compatible: bool = False
    dry_run: bool = False
    steps_max: int = 32

    def __post_init__(self) -> None:
        limits.check_range("rebalance.steps_max", self.steps_max, 1, STEPS_MAX, "moves")


@dataclass(slots=True)
class Rebalanced:
    """What was planned and what came of it.

    Attributes:
        plan: The steps.
        moved: Results, in the order of the steps that came about.
        failed: By session, why not.
        left_out: By node, why it took no part.
    """

    plan: Plan = field(default_factory=lambda: Plan(()))
    moved: list[pb.MigrateResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


async def rebalance(order: RebalanceOrder, tell: Callable[[Step], None]) -> Rebalanced:
    """Plan, and make the steps one after the other, unless it is a dry run.

    A plan is made once: what a step that failed would have changed, the next run sees.

    Args:
        order: What was asked for.
        tell: Told of each step before it is made.

    Raises:
        CredentialsError: The folder is not usable.
        PeerUnavailableError: The node that was asked does not answer.
        PeerAnswerError: It refuses this client.
    """
    done = Rebalanced()
    async with NodeClient(order.credentials_dir, order.node, order.address) as asked:
        nodes = await fleet_of(asked)
    async with _clients(order, nodes, done) as clients:
        held = await _held(clients, done)
        taking = [one for one in nodes if one.name in held]
        done.plan = plan_rebalance(
            taking, held, accept_compatible=order.accept_compatible, steps_max=order.steps_max
        )
        addresses = {one.name: Address.parse(one.address) for one in taking}
        for step in () if order.dry_run else done.plan.steps:
            tell(step)
            try:
                result = await move_one(
                    clients[step.source], step, addresses[step.target],
                    accept_compatible=order.accept_compatible,
                )  # fmt: skip
            except (PeerAnswerError, PeerUnavailableError) as error:
                done.failed[step.session.session_id] = str(error)
            else:
                done.moved.append(result)
    return done


@contextlib.asynccontextmanager
async def _clients(
    order: RebalanceOrder, nodes: tuple[NodeState, ...], done: Rebalanced
) -> AsyncIterator[dict[str, NodeClient]]:
    """A client of each node that runs and is pinned."""
    clients: dict[str, NodeClient] = {}
    async with contextlib.AsyncExitStack() as stack:
        for one in nodes:
            if one.is_away:
                done.left_out[one.name] = "has no lease"
                continue
            address = order.address if one.name == order.node else Address.parse(one.address)
            try:
                client = NodeClient(order.credentials_dir, one.name, address)
            except CredentialsError as error:
                done.left_out[one.name] = str(error)
                continue
            clients[one.name] = await stack.enter_async_context(client)
        yield clients


async def _held(
    clients: dict[str, NodeClient], done: Rebalanced
) -> dict[str, tuple[SessionLoad, ...]]:
    """What each node has; one that does not answer takes no part."""
    found: dict[str, tuple[SessionLoad, ...]] = {}
    names = list(clients)
    answers = await asyncio.gather(
        *(held_by(clients[name]) for name in names), return_exceptions=True
    )
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, KvpackError):
            done.left_out[name] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[name] = answer.loads
    return found
