"""Saving while a session goes on: the pack holds the session as it was at the cut."""

from __future__ import annotations

import pytest
from node_support import WINDOW, prompt, run

from kvpack.bundle import BundleReader, read_snapshot
from kvpack.errors import PublishError
from kvpack.keys import Keyring
from node.save import cut_now, write_cut


@pytest.mark.parametrize("tokens", [WINDOW - 1, 3 * WINDOW + 5, 600])
def test_a_pack_that_is_written_late_holds_the_rows_of_its_cut(world, tmp_path, tokens):
    async def work():
        async with world.node("source") as (node, client):
            await client.append(await client.open("s"), prompt(tokens))
            session = await node.sessions.find("s")
            engine, binding = node.sessions.engine, node.moves.binding
            before = await engine.call(
                session.generation.snapshot, session.token_ids[: session.position]
            )
            cut = await cut_now(engine, binding, session)
            # The rings turn all the way round before a byte is written.
            for _ in range(2 * WINDOW):
                await engine.call(session.decode_next)
            saved = await write_cut(engine, binding, cut, tmp_path / "s.kvpack")
            with BundleReader.open(saved.path, Keyring([binding.key])) as reader:
                after = read_snapshot(reader)
                assert reader.manifest.position == saved.position == tokens - 1
            return before, after

    before, after = run(work())
    assert after.token_ids == before.token_ids
    rows = [{tile.spec: bytes(tile.data) for tile in one.tiles} for one in (before, after)]
    assert rows[0] == rows[1]


def test_a_save_that_cannot_be_written_leaves_nothing_behind(world, tmp_path):
    async def work():
        async with world.node("source") as (node, client):
            await client.append(await client.open("s"), prompt(40))
            session = await node.sessions.find("s")
            engine, binding = node.sessions.engine, node.moves.binding
            cut = await cut_now(engine, binding, session)
            folder = tmp_path / "packs"
            folder.mkdir()
            (folder / "taken.kvpack").write_bytes(b"here")
            for path in (folder / "taken.kvpack", folder / "none" / "s.kvpack"):
                with pytest.raises(PublishError):
                    await write_cut(engine, binding, cut, path)
            assert [one.name for one in folder.iterdir()] == ["taken.kvpack"]

    run(work())
