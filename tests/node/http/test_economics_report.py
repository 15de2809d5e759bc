"""What ``kvnode economics`` makes of answers that no node gives, of places and of keys."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from node.cli import main
from node.economics.report import fetch, table
from node.errors import PeerAnswerError, UsageError


@contextlib.contextmanager
def answering(body: bytes, status: int = 200, length: int | None = None):
    """A server that says ``body`` to everybody, its URL, and the keys that it was told."""
    keys = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            keys.append(self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        server.server_close()


def cut(**fields):
    plain = {"cut": "ab" * 16, "tokens": 9, "state_bytes": 1, "prefill": None, "restores": []}
    return {**plain, **fields}


def restored(**fields):
    return [{"tier": "disk", "count": 1, "median_s": 1.0, "of_prefill": None, **fields}]


@pytest.mark.parametrize(
    "strange",
    [
        cut(restores=restored(tier=True)),
        cut(restores=restored(tier="a" * 100)),
        cut(restores=restored(tier="\u202edisk")),
        cut(restores=restored(median_s=10**400)),
        cut(restores=restored(of_prefill=10**400)),
        cut(prefill={"computed_tokens": 9, "wall_s": 10**400}),
        cut(tokens=10**4000),
        cut(cut="ab\r\x0b\x0cab"),
        cut(cut="ab" * 5000),
        cut(cut=None),
    ],
)
def test_a_field_that_no_table_could_hold_is_refused_by_name(strange):
    with (
        answering(json.dumps({"cuts": [strange]}).encode()) as (url, _),
        pytest.raises(PeerAnswerError, match="no node of this release"),
    ):
        table(fetch(url, "")["cuts"])


@pytest.mark.parametrize(
    "url",
    [
        "http://" + "a" * 70 + ":80",
        "http://a..b:80",
        "http://\u2603.example",
        "http://127.0.0.1:\uff18\uff10",
        "http://h ost",
        "http://\x00",
        "http://127.0.0.1:8080\n",
        "http://127.0.0.1:" + "1" * 5000,
    ],
)
def test_what_is_no_place_is_refused_before_anything_is_asked(url):
    with pytest.raises(UsageError, match=r"--url '.{1,300}': expected http://HOST:PORT") as refused:
        fetch(url, "")
    assert len(str(refused.value)) < 400


def test_a_proxy_of_the_environment_is_told_no_key(monkeypatch):
    """The key goes to the node that was named: a proxy would read it."""
    with answering(b'{"cuts": []}') as (proxy, told), answering(b'{"cuts": []}') as (url, keys):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert fetch(url, "kvp-secret")["cuts"] == []
        assert (told, keys) == ([], ["Bearer kvp-secret"])


def test_a_refusal_cannot_steer_a_terminal():
    body = json.dumps({"error": {"code": "x", "message": "no\x1b[2J\nmore\u202e"}}).encode()
    with answering(body, 403) as (url, _):
        ran = CliRunner().invoke(main, ["economics", "--url", url])
    assert ran.exit_code == 1
    assert ran.stderr == f"kvnode: error: {url}: no\\x1b[2J more\\u202e\n"


def test_a_refusal_that_breaks_off_is_one():
    with (
        answering(b'{"error', 500, length=1000) as (url, _),
        pytest.raises(PeerAnswerError, match="found HTTP status 500"),
    ):
        fetch(url, "")
