"""A pinned node of another tenant: refused, with the reason in the log only."""

from __future__ import annotations

import logging

import grpc
import pytest
from node_support import HandSource, prompt, run

from kvpack.keys import generate_key, write_key_file


def test_a_node_of_another_tenant_is_refused_and_not_told_why(world, caplog):
    key = world.credentials("target") / "tenant.key"
    key.unlink()
    write_key_file(key, generate_key("elsewhere"))

    async def work():
        async with (
            world.node("source") as (source, _),
            world.node("target") as (target, _),
            HandSource(world, source, target) as hand,
        ):
            await hand.take_cut("s", prompt(40))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await hand.prepare()
            return refused.value

    with caplog.at_level(logging.WARNING):
        error = run(work())
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED and error.details() == "refused"
    wire = str(error.trailing_metadata()) + error.details()
    assert "tests" not in wire and "elsewhere" not in wire and "tenant" not in wire
    assert "source: a transfer of tenant 'tests', this node holds 'elsewhere'" in caplog.text
