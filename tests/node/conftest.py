"""Fixtures of the node's tests: one tiny model, credentials that know each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from node.config import prepare_process

prepare_process()

# Tests of several folders start nodes with an HTTP port by one harness.
sys.path.insert(0, str(Path(__file__).parent / "http"))

import directory_support  # noqa: E402 - gRPC reads its environment when it is imported
import node_support  # noqa: E402


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model folder with a window of 16 tokens."""
    return node_support.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def world(tmp_path, model_dir):
    """Credentials of two nodes, a third node, a client and a stranger; nothing runs yet."""
    return node_support.World.make(tmp_path, model_dir)


@pytest.fixture(scope="session")
def parties(tmp_path_factory):
    """Credentials of a keeper of a directory and of those who use it."""
    return directory_support.enroll_all(tmp_path_factory.mktemp("parties"))


@pytest.fixture(params=["sqlite", "grpc"])
def directories(request, tmp_path, parties):
    """A directory: the file itself, and the same file on another node."""
    reached = None if request.param == "sqlite" else parties
    return directory_support.Place(tmp_path / "directory.sqlite", reached)
