"""Engines for the ladder's tests: one thread and model for each architecture, for all tests."""

from __future__ import annotations

import asyncio

import ladder_support
import pytest

from node.engine_thread import EngineThread


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """``engines(arch)``: a loaded tiny model with a window of 16 tokens."""
    loaded: dict[str, EngineThread] = {}

    def engine_of(arch: str) -> EngineThread:
        if arch not in loaded:
            folder = ladder_support.make_model(tmp_path_factory.mktemp("models") / arch, arch)
            loaded[arch] = asyncio.run(EngineThread.load(folder))
        return loaded[arch]

    yield engine_of
    for engine in loaded.values():
        engine.close()


@pytest.fixture
def laddered(engines, tmp_path):
    """``laddered(work, arch, **options)``: run ``work(place)`` with a ladder over a new store."""

    def run(work, arch="muse_glimmer", seconds=60.0, **options):
        place = ladder_support.Place(engines(arch), tmp_path / "store", **options)

        async def bounded():
            async with asyncio.timeout(seconds), place:
                return await work(place)

        return asyncio.run(bounded())

    return run
