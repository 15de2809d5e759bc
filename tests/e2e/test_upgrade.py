"""A node of another build beside one of this checkout: there, back, and over an upgrade in place.

The other build is a wheel. ``PREVIOUS_WHEEL`` names that of the release before; without a release
there is none, and the slow suite runs the same steps with a wheel of this checkout.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from e2e_support import ROOT
from wheel_support import Build, build_wheel

from kvpack.keys import generate_key, write_key_file
from node.demo.stage import CLIENT, SOURCE, TARGET, Stage, _enroll_all
from node.migration.versions import OURS, choose, read_minors
from node.migration.versions import Speaker as Speaks
from node.pb.v1 import session_pb2 as pb

#: A file on this machine: the wheel of the release before, as its users have it.
PREVIOUS = os.environ.get("PREVIOUS_WHEEL", "")

TOKENS = [(17 * i + i * i) % 251 for i in range(600)]


@pytest.fixture
def stage(tmp_path, model_dir):
    """Keys and certificates of two nodes and a client."""
    work = tmp_path / "work"
    work.mkdir(mode=0o700)
    made = Stage(tmp_path, work, model_dir)
    write_key_file(made.key, generate_key("tests"))
    _enroll_all(made)
    return made


def releases() -> list[str]:
    """The releases that the changelog names."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return [one for one in headings if one != "Unreleased"]


async def moved(client, session, target, address, tokens=()):
    order = pb.MigrateRequest(
        session_id=session.session_id, token=session.token, target_node=target,
        target_address=str(address), token_ids=tokens, accept_compatible=True,
    )  # fmt: skip
    async for event in client.migrate(order):
        if event.WhichOneof("event") == "result":
            return event.result
    raise AssertionError("without a result")


async def told(client, session, index, count):
    return [(one.index, one.token_id) async for one in client.generate(session, index, count)]


async def there_and_back(stage, ours: Build, other: Build):
    """Move between the two builds, then start the other one's node anew with ours."""
    index = len(TOKENS)
    async with ours.node(stage, SOURCE, CLIENT) as (here, giving):
        async with other.node(stage, TARGET, CLIENT) as (there, taking):
            said = await taking.describe()
            # An older build says no range and speaks 1.0 alone.
            choose(Speaks(SOURCE, OURS), Speaks(TARGET, read_minors(said.protocol), said.version))
            result = await moved(giving, await giving.open("s"), TARGET, there, TOKENS)
            assert result.state_verdict == "exact"
            twin = await giving.append(await giving.open("twin"), TOKENS)
            expected = await told(giving, twin, index, 12)
            exact = result.continuation_verdict == "exact"
            found = await told(taking, await taking.get("s"), index, 4)
            assert not exact or found == expected[:4]
            await moved(taking, await taking.get("s"), SOURCE, here)
            kept = await told(giving, await giving.get("s"), index, 8)
            assert kept[:4] == found and (not exact or kept == expected[:8])
            await moved(giving, await giving.get("s"), TARGET, there)
        # The upgrade: the same folder, journal and packs, another program.
        async with ours.node(stage, TARGET, CLIENT) as (_, upgraded):
            after = await told(upgraded, await upgraded.get("s"), index, 12)
            assert after[:8] == kept and (not exact or after == expected)
    return said.version


def run(work):
    async def bounded():
        async with asyncio.timeout(240):
            return await work

    return asyncio.run(bounded())


def test_the_previous_release_and_this_checkout_move_sessions_to_one_another(stage, tmp_path):
    if not PREVIOUS:
        # As soon as there is a release, a run without its wheel is one that tested nothing.
        assert releases() == [], "PREVIOUS_WHEEL: name the wheel of the release before"
        pytest.skip(
            "there is no release before this one: CHANGELOG.md names none, so there is no wheel "
            "to run; test_a_wheel_of_this_checkout in the slow suite runs the same steps"
        )
    other = Build.unpacked(Path(PREVIOUS), tmp_path / "other")
    assert run(there_and_back(stage, Build(ROOT), other)) in Path(PREVIOUS).name


@pytest.mark.slow
def test_a_wheel_of_this_checkout_and_this_checkout_move_sessions_to_one_another(stage, tmp_path):
    wheel = build_wheel(tmp_path / "wheel")
    other = Build.unpacked(wheel, tmp_path / "other")
    assert run(there_and_back(stage, Build(ROOT), other)) in wheel.name
