"""Sessions in stores: moved there and back, copied, raced for, interrupted at every step."""

from __future__ import annotations

import dataclasses

import pytest
from node_support import World, events, prompt, run

from node.pb.v1 import session_pb2 as pb


class StoreWorld(World):
    """Nodes that may open stores below one folder."""

    def config(self, name, model_dir=None):
        config = super().config(name, model_dir)
        return dataclasses.replace(config, store_roots=(self.root / "stores",))

    @property
    def store(self) -> str:
        return str(self.root / "stores" / "team")


@pytest.fixture
def stores(tmp_path, model_dir):
    world = StoreWorld.make(tmp_path, model_dir)
    (tmp_path / "stores").mkdir()
    return world


def order(world, session_id="s", **options) -> pb.RestoreRequest:
    return pb.RestoreRequest(session_id=session_id, store=world.store, **options)


def test_a_session_goes_into_a_store_and_comes_back_on_another_node_bit_for_bit(stores):
    async def work():
        async with stores.pair() as (source, giving, _, taking):
            session = await giving.append(await giving.open("s"), prompt(300))
            await events(giving, session, 300, 5)
            twin = await giving.append(await giving.open("twin"), prompt(300))
            expected = await events(giving, twin, 300, 20)
            parked = await giving.park(await giving.get("s"), stores.store, copy=False)
            entry = await source.sessions.directory.owner("s")
            assert entry.node == f"store.{parked.store_id.hex()}"
            assert "s" not in source.sessions
            restored = await taking.restore(order(stores))
            assert restored.continuation_verdict == "exact"
            found = await events(taking, await taking.get("s"), 300, 20)
            return expected, found

    expected, found = run(work())
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert found[-10:] == expected[-10:]
