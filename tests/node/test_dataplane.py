"""Sealed chunks beside mTLS: moves over plain planes, and every way to disturb one."""

from __future__ import annotations

import pytest
from node_support import events, move, prompt, run
from plane_support import Plane, intake_of, offering, two

from node.dataplane.options import plane_message

PLAIN = [Plane.GRPC_PLAIN, Plane.SOCKET]
by_plane = pytest.mark.parametrize("plane", PLAIN, ids=lambda plane: plane.value)


async def moved_equal(giving, target, taking, plane, tokens, *, live=False):
    """Move a session over ``plane``; gives the result once the target goes on like a twin."""
    session = await giving.open("s")
    if live:
        session = await giving.append(session, tokens)
    result = await move(
        giving, target, session, () if live else tokens, data_plane=plane_message(plane)
    )
    assert result is not None
    twin = await giving.append(await giving.open("twin"), tokens)
    expected = await events(giving, twin, len(tokens), 8)
    assert await events(taking, await taking.get("s"), len(tokens), 8) == expected
    return result


@by_plane
@pytest.mark.parametrize("live", [False, True], ids=["prompt", "live"])
def test_a_session_moves_over_a_plain_plane_and_goes_on_bit_for_bit(world, plane, live):
    async def work():
        async with two(world, offering(*PLAIN)) as (_, giving, target, taking):
            result = await moved_equal(giving, target, taking, plane, prompt(700), live=live)
            assert (result.data_plane, result.plane_fallback) == (plane.value, "")
            assert result.resumed == 0
            assert result.wire_bytes > result.payload_bytes
            assert len(intake_of(target).tickets) == 0

    run(work())
