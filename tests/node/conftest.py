"""Fixtures of the node's tests: one tiny model, credentials that know each other."""

from __future__ import annotations

import pytest

from node.config import prepare_process

prepare_process()

import node_support  # noqa: E402 - gRPC reads its environment when it is imported


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model folder with a window of 16 tokens."""
    return node_support.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def world(tmp_path, model_dir):
    """Credentials of two nodes, a third node, a client and a stranger; nothing runs yet."""
    return node_support.World.make(tmp_path, model_dir)
