"""Moves over networks that are slow, late, lossy, or gone for a while."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time

import pytest

from node.config import Address

from .campaign import Campaign
from .lab import Lab, NodeProcess, started
from .link import Link
from .outside import check_bits, check_disks, check_one_owner, find_server
from .packets import CUT, FAIR, Air, Weather
from .plan import Plan
from .result import Result

WEATHERS = (
    Weather("delay 40 ms", delay_s=0.04),
    Weather("loss 1 %", loss=0.01),
    Weather("loss 10 %", loss=0.10),
    Weather("10 Mbit/s", bits_per_s=10e6),
    Weather("cut for 3 s, then healed", delay_s=0.01),
)
CUT_S = 3.0

#: A move over a bad network is slow, and is not to be given up for that.
LEASE_S = 30.0

#: Inside a namespace, where nobody else is.
ALL = "0.0.0.0"  # noqa: S104


class Packets:
    """Namespaces whose packets we carry: what TCP meets is loss itself."""

    name = "packets between two network namespaces (TUN), as lossy as we make them"

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.air = Air()

    @contextlib.asynccontextmanager
    async def open(self):
        with self.air.open() as places:
            self.nodes = [
                NodeProcess(
                    self.lab,
                    name,
                    host=place.here,
                    listen=ALL,
                    prefix=place.prefix,
                    transfer_lease_s=LEASE_S,
                )
                for name, place in zip("ab", places, strict=True)
            ]
            self.there = {
                node.name: Address(place.there, node.port)
                for node, place in zip(self.nodes, places, strict=True)
            }
            yield

    def can(self, weather: Weather) -> bool:
        return True

    def set(self, weather: Weather) -> None:
        self.air.weather = weather

    async def cut(self, weather: Weather) -> None:
        self.air.weather = CUT
        await asyncio.sleep(CUT_S)
        self.air.weather = weather


class Streams:
    """TCP connections that we carry. Loss cannot be had: TCP has repaired it below us."""

    name = "TCP connections through a proxy; loss of packets cannot be had this way"

    def __init__(self, lab: Lab, nursery) -> None:
        self.nodes = [NodeProcess(lab, name, nursery, transfer_lease_s=LEASE_S) for name in "ab"]
        self.links = {node.name: Link(node.address) for node in self.nodes}

    @contextlib.asynccontextmanager
    async def open(self):
        async with contextlib.AsyncExitStack() as stack:
            self.there = {
                name: await stack.enter_async_context(link.open())
                for name, link in self.links.items()
            }
            yield

    def can(self, weather: Weather) -> bool:
        return weather.loss == 0.0

    def set(self, weather: Weather) -> None:
        for link in self.links.values():
            link.delay_s, link.bytes_per_s = weather.delay_s, weather.bits_per_s / 8

    async def cut(self, weather: Weather) -> None:
        for link in self.links.values():
            link.carries.clear()
        await asyncio.sleep(CUT_S)
        for link in self.links.values():
            link.carries.set()


def permitted() -> str:
    """Why namespaces cannot be had here; empty where they can."""
    try:
        with Air().open():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return str(error)


async def one(runs: Campaign, means, weather: Weather, seed: int) -> tuple[Result, float]:
    """A live session moves to and fro under ``weather``; gives what was found and the seconds."""
    plan = Plan(seed, "live", "", (), (), (), False, 0.3)
    means.set(FAIR)
    await runs.new_session(plan)
    giving = runs.home
    taking = next(node for node in runs.nodes if node is not giving)
    result, start = Result(plan), time.monotonic()
    following = asyncio.ensure_future(runs.talk.follow([giving, taking]))
    means.set(weather)
    moving = asyncio.ensure_future(runs.try_move(plan, giving, taking, means.there[taking.name]))
    if weather.name.startswith("cut"):
        await asyncio.sleep(0.05)
        await means.cut(weather)
    result.outcome = await moving
    seconds = time.monotonic() - start
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    server = await find_server(runs.lab, runs.nodes, runs.talk)
    if server is None:
        result.found.lost.append("nobody serves it")
        return result, seconds
    await check_one_owner(runs.lab, runs.nodes, runs.talk, result.found)
    await check_bits(server, runs.talk, result.found)
    await check_disks(runs.lab, runs.nodes, result.found)
    return result, seconds


@pytest.mark.slow
def test_sessions_move_over_bad_networks(lab, nursery, capsys):
    refused = permitted()
    means = Streams(lab, nursery) if refused else Packets(lab)

    async def work():
        rows = []
        async with asyncio.timeout(280), means.open(), started(*means.nodes):
            runs = Campaign(lab, nursery)
            runs.nodes, runs.there = means.nodes, means.there
            for seed, weather in enumerate(one for one in WEATHERS if means.can(one)):
                result, seconds = await one(runs, means, weather, seed)
                rows.append((weather.name, result, seconds))
        return rows

    rows = asyncio.run(work())
    with capsys.disabled():
        print(f"\nmeans: {means.name}" + (f" ({refused})" if refused else ""))
        for name, result, seconds in rows:
            print(f"  {name:28} {result.outcome:20} {seconds:6.2f} s  {result.found.all()}")
    assert [result.found.all() for _, result, _ in rows] == [[]] * len(rows)
    assert [result.outcome for _, result, _ in rows] == ["done"] * len(rows)
    if not refused:
        assert means.air.lost > 0 and len(rows) == len(WEATHERS)
