"""What a service manager hears of a node."""

from __future__ import annotations

import logging
import secrets
import socket

import pytest
from harness import served

from node.notify import READY, STOPPING, notify


@pytest.fixture
def manager(tmp_path):
    """A socket such as systemd's, and its path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(20)
        listener.bind(str(tmp_path / "notify"))
        yield listener, str(tmp_path / "notify")


def test_a_node_says_that_it_is_ready_once_it_answers_and_that_it_stops(
    manager, tmp_path, model_dir
):
    listener, place = manager
    told = {"NOTIFY_SOCKET": place}
    with served(tmp_path / "data", model=model_dir, environment=told) as node:
        assert listener.recv(100) == READY.encode()
        assert node.stop() == 0
    assert listener.recv(100) == STOPPING.encode()


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_an_abstract_name_is_understood():
    name = f"kvpack-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(5)
        try:
            listener.bind(f"\0{name}")
        except OSError:
            pytest.skip("only Linux has abstract names")
        assert notify(f"@{name}", READY)
        assert listener.recv(100) == READY.encode()


def test_nobody_who_wants_to_know_and_nobody_who_listens_cost_nothing(tmp_path, caplog):
    assert not notify("", READY)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert not notify(str(tmp_path / "gone"), STOPPING)
    assert "was not told STOPPING=1" in caplog.text
