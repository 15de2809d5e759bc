"""Fixtures of what is deployed: the node's own, from its folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from node.config import prepare_process

prepare_process()

_NODE = Path(__file__).resolve().parents[1] / "node"
for _folder in (_NODE, _NODE / "http"):
    sys.path.insert(0, str(_folder))

import node_support  # noqa: E402 - gRPC reads its environment when it is imported


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model folder with a window of 16 tokens."""
    return node_support.make_model(tmp_path_factory.mktemp("model"))
