"""Two real nodes: each page says who owns what, before and after a move."""

from __future__ import annotations

import contextlib
import dataclasses

from node_support import move, prompt, run

from node.client import NodeClient
from node.config import Address
from node.http.options import HttpOptions
from node.metrics.views import Standing
from node.server import running


@contextlib.asynccontextmanager
async def web_pair(world):
    """Source and target with HTTP ports, and a client of the source."""
    configs = [
        dataclasses.replace(
            world.config(name), http=HttpOptions(Address("127.0.0.1", 0), drain_s=1.0)
        )
        for name in ("source", "target")
    ]
    async with (
        running(configs[0]) as source,
        running(configs[1]) as target,
        NodeClient(world.credentials("client"), "source", source.address) as client,
    ):
        yield source, target, client


async def looked(node):
    """The node's desk, with the other nodes seen just now."""
    desk = node.entrance.door.desk
    await desk.watcher.parts.peers.look()
    return desk


def owners(desk) -> dict[str, tuple[str, Standing]]:
    return {one.session_id: (one.owner, one.standing) for one in desk.watcher.status().sessions}


def test_pages_of_two_nodes_agree_about_an_owner(world):
    async def go():
        async with web_pair(world) as (source, target, client):
            session = await client.open("talk")
            await client.append(session, prompt(40))
            giving, taking = await looked(source), await looked(target)
            assert owners(giving) == {"talk": ("source", Standing.SERVING)}
            assert owners(taking) == {"talk": ("source", Standing.ELSEWHERE)}
            await move(client, target, session)
            giving, taking = await looked(source), await looked(target)
            assert owners(giving) == {"talk": ("target", Standing.ELSEWHERE)}
            assert owners(taking) == {"talk": ("target", Standing.SERVING)}
            given, taken = giving.page.parts(), taking.page.parts()
            assert "to <b>target</b> done" in given["moves"]
            assert "without a token" in given["moves"]
            assert "from <b>source</b> done" in taken["moves"]
            assert "On another node" in given["sessions"]
            for parts in (given, taken):
                assert "lease runs" in parts["nodes"] and "third" in parts["nodes"]
            scraped = giving.metrics.exposition().decode()
            done = 'kvpack_moves_total{direction="out",kind="move",outcome="done"} 1.0'
            assert done in scraped and "talk" not in scraped
            assert 'kvpack_move_phase_seconds_count{phase="pause"} 1.0' in scraped

    run(go())
