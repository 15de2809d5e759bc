"""What a service manager hears of a node."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
from pathlib import Path

import pytest
from harness import served

from node import enroll
from node.http.auth import add_key
from node.notify import READY, STOPPING, notify


@pytest.fixture
def manager(tmp_path):
    """A socket such as systemd's, and its path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(20)
        listener.bind(str(tmp_path / "notify"))
        yield listener, str(tmp_path / "notify")


def health(port: int, authority: Path, name: str) -> int:
    """What a probe without an API key is answered, by the name in the certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=name) as line,
    ):
        line.sendall(b"GET /health HTTP/1.1\r\nHost: 10.0.0.7:8080\r\nConnection: close\r\n\r\n")
        return int(line.recv(100).split()[1])


def test_a_node_says_that_it_is_ready_once_it_answers_probes_and_that_it_stops(
    manager, tmp_path, model_dir
):
    listener, place = manager
    # As the deployed ones: the node's own pair for HTTPS, a file of API keys, all interfaces.
    folder = tmp_path / "credentials"
    enroll.enroll(tmp_path / "authority", folder, "node-a")
    add_key(tmp_path / "api-keys", "prod")
    options = (
        *("--host", "0.0.0.0", "--api-key-file", str(tmp_path / "api-keys")),  # noqa: S104
        *("--tls-cert", str(folder / enroll.NODE_CERTIFICATE)),
        *("--tls-key", str(folder / enroll.NODE_KEY)),
    )
    told = {"NOTIFY_SOCKET": place}
    with served(tmp_path / "data", *options, model=model_dir, environment=told) as node:
        assert listener.recv(100) == READY.encode()
        port = int(node.base_url.rsplit(":", 1)[1])
        assert health(port, folder / enroll.AUTHORITY_CERTIFICATE, "node-a") == 200
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
