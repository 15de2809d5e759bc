"""Two nodes and a hand-driven source with its cut taken, and what must be so after a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import grpc
from node_support import SECONDS, HandSource, events, prompt

from node.migration.table import TargetState

_C = grpc.StatusCode


@contextlib.asynccontextmanager
async def hand_source(world, tokens=90, name="s"):
    """Two nodes and a source that is driven by hand, with its cut taken."""
    async with (
        world.pair() as (source, giving, target, taking),
        HandSource(world, source, target) as hand,
    ):
        await hand.take_cut(name, prompt(tokens))
        hand.giving, hand.taking = giving, taking
        yield hand


@contextlib.asynccontextmanager
async def short_lease(hand, lease_s, *, streaming):
    """A transfer that does not go on lasts so long; from when its stream is open, if it has one.

    Not before: on a busy machine the lease would be over before the next step.
    """
    transfers = hand.target.transfers
    async with asyncio.timeout(SECONDS):
        while streaming and not any(one.is_streaming for one in transfers._inbound.values()):
            await asyncio.sleep(0.005)
    usual = transfers._target
    transfers._target = dataclasses.replace(usual, lease_s=lease_s)
    yield
    transfers._target = usual


async def nothing_installed(hand):
    """The target holds no session, no file and no memory of rows; the source owns the session."""
    assert len(hand.target.sessions) == 0
    owner = await hand.source.sessions.directory.owner("s")
    assert owner.node == "source"
    inbound = hand.target.transfers._inbound.values()
    live = [one for one in inbound if one.state is not TargetState.ABORTED]
    if not live:
        assert hand.world.spool("target") == []
    return not live


async def source_still_serves(hand):
    """The session on the source gives the same bits as a twin that nothing happened to."""
    tokens = len(hand.cut.snapshot.token_ids) + 1
    twin = await hand.giving.append(await hand.giving.open("twin"), prompt(tokens))
    session = await hand.giving.get("s")
    assert await events(hand.giving, session, tokens, 8) == await events(
        hand.giving, twin, tokens, 8
    )
