"""Fixtures of the node's tests: one tiny model, credentials that know each other."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import pytest

from node.config import prepare_process

prepare_process()

# Tests of several folders start nodes with an HTTP port by one harness.
sys.path.insert(0, str(Path(__file__).parent / "http"))

import directory_support  # noqa: E402 - gRPC reads its environment when it is imported
import etcd_support  # noqa: E402
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


@pytest.fixture(scope="session")
def etcds(tmp_path_factory, parties):
    """One etcd of one member, over mutual TLS, for all tests of this process."""
    etcd_support.require_etcd()
    root = tmp_path_factory.mktemp("etcd")
    with etcd_support.Etcds(root, authority=parties / "authority") as running:
        yield running


@pytest.fixture(params=["sqlite", "grpc"])
def files(request, tmp_path, parties):
    """A directory in a file: itself, and on another node."""
    return _place(request.param, tmp_path, parties)


@pytest.fixture(params=["sqlite", "grpc", "etcd"])
def directories(request, tmp_path, parties):
    """A directory of each kind: a file, the same file on another node, a real etcd."""
    if request.param == "etcd":
        prefix = f"tests/{secrets.token_hex(8)}"
        return etcd_support.EtcdPlace(request.getfixturevalue("etcds"), parties, prefix)
    return _place(request.param, tmp_path, parties)


def _place(kind, tmp_path, parties):
    reached = None if kind == "sqlite" else parties
    return directory_support.Place(tmp_path / "directory.sqlite", reached)
