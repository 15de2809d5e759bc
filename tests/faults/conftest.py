"""Fixtures of the fault campaign: one lab for all its tests."""

from __future__ import annotations

import contextlib

import pytest

from node.config import prepare_process

# gRPC reads its environment when it is imported.
prepare_process()


@pytest.fixture
def lab(tmp_path):
    """Keys, certificates and a tiny model of two nodes; nothing runs yet."""
    from .lab import Lab

    return Lab.make(tmp_path / "lab")


@pytest.fixture(scope="session")
def nursery():
    """What starts nodes fast."""
    from .nursery import Nursery

    with contextlib.closing(Nursery()) as made:
        yield made
