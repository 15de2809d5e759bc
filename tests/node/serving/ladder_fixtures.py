"""Engines for the ladder's tests: one thread and model for each architecture, for all tests."""

from __future__ import annotations

import asyncio

import ladder_support
import pytest

from node.engine_thread import EngineThread


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """``engines(arch, window)``: a loaded tiny model."""
    loaded: dict[tuple[str, int], EngineThread] = {}

    def engine_of(arch: str, window: int = ladder_support.WINDOW) -> EngineThread:
        if (arch, window) not in loaded:
            folder = tmp_path_factory.mktemp("models") / arch
            ladder_support.make_model(folder, arch, window)
            loaded[arch, window] = asyncio.run(EngineThread.load(folder))
        return loaded[arch, window]

    yield engine_of
    for engine in loaded.values():
        engine.close()


@pytest.fixture
def laddered(engines, tmp_path):
    """``laddered(work, arch, window)``: run ``work(place)`` with a ladder over a new store."""

    def run(work, arch="muse_glimmer", window=ladder_support.WINDOW, seconds=60.0, **options):
        place = ladder_support.Place(engines(arch, window), tmp_path / "store", **options)

        async def bounded():
            async with asyncio.timeout(seconds), place:
                return await work(place)

        return asyncio.run(bounded())

    return run
