"""Requests that are too long, too slow, too deep or no requests at all."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest
from harness import ask, code, served, web_node, within

from node import enroll
from node.http import body as bodies
from node.http.body import BODY_BYTES_MAX, decode_json
from node.http.errors import ApiError
from node.http.quota import Quotas


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with served(tmp_path_factory.mktemp("limits") / "data") as running:
        yield running


def post(node, body: bytes, **headers):
    return ask(f"{node.v1}/chat/completions", "POST", body, **headers)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[" * 100_000, "invalid_value"),
        (b'{"tools": ' + b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "invalid_json"),
        (b'{"messages": NaN}', "invalid_json"),
        (b'{"temperature": 1e400, "messages": []}', "invalid_value"),
        (b"\xff\xfe", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"{}", "invalid_request"),
        (b'{"messages": 1}', "malformed"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
    ],
)
def test_what_is_no_request_is_refused_in_bounded_time(node, body, word):
    answer = post(node, body)
    assert (answer[0], code(answer)) == (400, word)


def test_a_body_beyond_the_bound_is_refused_before_it_is_read(node):
    told = subprocess.run(
        ["curl", "-s", "-m", "20", "-w", "%{http_code} %{size_upload}", "-o", "/dev/null",
         "-H", "Expect: 100-continue", "--data-binary", "@-", f"{node.v1}/chat/completions"],
        input=b" " * (BODY_BYTES_MAX + 1), capture_output=True, check=False,
    )  # fmt: skip
    status, sent = told.stdout.decode().split()
    assert status == "413" and int(sent) == 0
    answer = post(node, b" " * (1 << 20) + b"{}")
    assert (answer[0], code(answer)) == (400, "invalid_request")


def test_a_chunked_body_has_the_same_bound(tmp_path):
    async def work():
        async with web_node(tmp_path / "data") as web:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            reader, writer = await opened(web)
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
            block = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            for _ in range(BODY_BYTES_MAX // 0x10000 + 1):
                writer.write(block)
                await writer.drain()
            assert b" 413 " in await reader.readline()
            writer.transport.abort()

    within(work(), 90)


async def opened(web):
    host, port = web.base_url.removeprefix("http://").rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


def test_slow_heads_and_bodies_are_cut_off(monkeypatch, tmp_path):
    # What is in time has to be here in it, too, however busy the machine is.
    monkeypatch.setattr("node.http.listen.HEAD_S", 1.5)
    monkeypatch.setattr(bodies, "BODY_S", 0.3)

    async def work():
        async with web_node(tmp_path / "data") as web:
            for start in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
                reader, writer = await opened(web)
                writer.write(start)
                for _ in range(80):
                    if writer.transport.is_closing():
                        break
                    writer.write(b"x" if start else b"")
                    await asyncio.sleep(0.05)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            reader, writer = await opened(web)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            writer.write(b"Content-Length: 10\r\n\r\n{")
            assert b" 408 " in await reader.readline()
            writer.transport.abort()
            # One that is asked again on a connection that was quiet for a moment is served.
            reader, writer = await opened(web)
            for _ in range(2):
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 200 " in await reader.readline()
                await reader.readuntil(b'{"status":"ok"}')
                await asyncio.sleep(0.1)
            writer.transport.abort()

    within(work(), 90)


def test_heads_beyond_the_bound_are_refused(node):
    answer = subprocess.run(
        ["curl", "-s", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}",
         "-H", f"X-Long: {'x' * 60_000}", f"{node.base_url}/health"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert answer.stdout.decode() == "431"
    assert ask(f"{node.base_url}/health")[0] == 200


def test_bodies_become_values_or_one_refusal():
    assert decode_json(b'{"a": 1, "b": [null]}', dict) == {"a": 1, "b": [None]}
    with pytest.raises(ApiError) as caught:
        decode_json(b'{"a": "secret"}', dict[str, int])
    assert "secret" not in str(caught.value) and caught.value.status == 400


def test_quotas_count_calls_and_let_tokens_flow_off():
    now = [0.0]
    quotas = Quotas(2, 60, lambda: now[0])
    with quotas.admitted("a"), quotas.admitted("a"), quotas.admitted("b"):
        with pytest.raises(ApiError) as caught, quotas.admitted("a"):
            raise AssertionError
        assert caught.value.status == 429 and caught.value.headers["Retry-After"] == "1"
    quotas.spend("a", 90)
    with pytest.raises(ApiError) as caught, quotas.admitted("a"):
        raise AssertionError
    assert caught.value.headers["Retry-After"] == "31"
    with quotas.admitted("b"):
        pass
    now[0] = 31.0
    with quotas.admitted("a"):
        pass


def test_a_node_with_a_certificate_answers_over_tls_alone(tmp_path):
    enroll.enroll(tmp_path / "authority", tmp_path / "leaf", "localhost")
    leaf = tmp_path / "leaf"
    tls = (
        "--tls-cert",
        str(leaf / enroll.NODE_CERTIFICATE),
        "--tls-key",
        str(leaf / "node-key.pem"),
    )
    with served(tmp_path / "data", *tls) as node:
        port = node.base_url.rsplit(":", 1)[1]
        assert node.base_url.startswith("https://")

        def curl(url, *arguments):
            return subprocess.run(
                ["curl", "-s", "-m", "10", *arguments, url], capture_output=True, check=False
            )

        trusted = ("--cacert", str(tmp_path / "authority" / enroll.AUTHORITY_CERTIFICATE))
        told = curl(f"https://localhost:{port}/health", *trusted)
        assert json.loads(told.stdout) == {"status": "ok"}
        assert curl(f"https://localhost:{port}/health").returncode != 0
        assert curl(f"http://localhost:{port}/health").returncode != 0
        assert curl(f"https://localhost:{port}/health", *trusted, "--tls-max", "1.1").returncode
