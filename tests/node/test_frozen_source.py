"""What a frozen source does with each thing that the directory can say of its session."""

from __future__ import annotations

import asyncio

import pytest
from node_support import events, move, prompt, run

from node.session import Phase


class Hiding:
    """A directory that answers for a while as if it had never heard of a session."""

    def __init__(self, directory):
        self._directory = directory
        self.hidden = False
        self.looks = 0

    def __getattr__(self, name):
        return getattr(self._directory, name)

    async def owner(self, session_id):
        if self.hidden:
            self.looks += 1
            return None
        return await self._directory.owner(session_id)


@pytest.mark.parametrize("committed", [True, False])
def test_a_session_that_vanished_from_the_directory_stays_frozen(world, caplog, committed):
    async def work():
        async with world.pair() as (source, giving, target, taking):
            session = await giving.append(await giving.open("s"), prompt(40))
            live = await source.sessions.find("s")
            directory = source.sessions.directory = Hiding(source.sessions.directory)
            commit = target.transfers.commit

            async def hide_then_commit(key):
                directory.hidden = True
                if committed:
                    return await commit(key)
                raise ValueError("not answered, nothing done")

            target.transfers.commit = hide_then_commit
            moving = asyncio.create_task(move(giving, target, session))
            while directory.looks < 2 and not moving.done():
                await asyncio.sleep(0.02)
            assert not moving.done()
            assert live.phase is Phase.FROZEN and "s" in source.sessions
            target.transfers.commit = commit
            directory.hidden = False
            if committed:
                assert (await moving).first_index == 40
                assert "s" not in source.sessions
                assert len(await events(taking, await taking.get("s"), 40, 3)) == 3
                return
            with pytest.raises(Exception, match="stays on this node"):
                await moving
            assert len(await events(giving, await giving.get("s"), 40, 3)) == 3

    caplog.set_level("WARNING", logger="node")
    run(work())
    assert "does not know the session" in caplog.text
