"""A session that travels through a bucket, between processes that never met."""

from __future__ import annotations

import asyncio
import json

import pytest
from e2e_support import command, failed_cleanly
from test_processes import node, prompt, run, stage, steps  # noqa: F401 - stage is a fixture

from node.demo.stage import CLIENT, SOURCE, TARGET
from tests.s3_server import OWNER, new_url, shared


@pytest.fixture
def bucket(monkeypatch):
    """A place in a bucket; the processes find the service and the account by the environment."""
    for name, value in OWNER.environment(shared().endpoint).items():
        monkeypatch.setenv(name, value)
    return new_url()


async def asked(*arguments):
    ran = await asyncio.to_thread(command, "node", *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_node_restores_what_one_that_it_never_spoke_to_put_into_a_bucket(
    stage,  # noqa: F811
    bucket,
):
    root, place = bucket, f"store:{bucket}/team"
    common = ("--credentials", str(stage.credentials(CLIENT)))

    async def work():
        async with node(stage, SOURCE, "--store-root", root) as (process, client):
            twin = await client.append(await client.open("twin"), prompt(200))
            expected = await steps(client, twin, 200, 12)
            session = await client.append(await client.open("s"), prompt(200))
            assert len(await steps(client, session, 200, 4)) == 4
            there = f"{SOURCE}@{process.address}"
            parked = await asked("migrate", "s", "--to", place, "--node", there, *common)
        # The first process has ended before the second one begins: only the bucket is between.
        async with node(stage, TARGET, "--store-root", root) as (process, client):
            there = f"{TARGET}@{process.address}"
            outside = await asyncio.to_thread(
                command, "node", "session", "restore", "s", "--node", there,
                "--from", "store:s3://shared/elsewhere", *common,
            )  # fmt: skip
            restored = await asked(
                "session", "restore", "s", "--node", there, "--from", place, *common
            )
            found = await steps(client, await client.get("s"), 200, 12)
        return expected, parked, restored, found, outside

    expected, parked, restored, found, outside = run(work())
    assert (restored["node"], restored["continuation_verdict"]) == (TARGET, "exact")
    assert restored["cut_id"] == parked["cut_id"] and restored["objects"] > 0
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    assert "--store-root" in failed_cleanly(outside)
    written = "".join(path.read_text() for path in (stage.log(SOURCE), stage.log(TARGET)))
    assert place.removeprefix("store:") in written or "into a store" in written
    assert OWNER.key not in written and OWNER.secret not in written
