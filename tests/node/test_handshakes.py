"""Why a handshake failed is in the node's log, although gRPC tells our code nothing."""

from __future__ import annotations

import io
import socket
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from node import enroll
from node.certificates import utc_now
from node.handshake_filter import LINES_PER_SECOND, Filter, translate
from node.trust import Role, pin

LINE = (
    b"I1130 00:09:23.814290   27877 ssl_transport_security.cc:2563] Handshake failed with error "
    b"SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:%s: %s\n"
)


@pytest.mark.parametrize(
    ("word", "more", "reason"),
    [
        (b"CERTIFICATE_VERIFY_FAILED", b"certificate has expired", "has expired"),
        (b"CERTIFICATE_VERIFY_FAILED", b"unable to get local issuer certificate", "not the pinned"),
        (b"CERTIFICATE_VERIFY_FAILED", b"Hostname Verification Check failed.", "another name"),
        (b"PEER_DID_NOT_RETURN_A_CERTIFICATE", b"x", "no certificate"),
        (b"NO_SHARED_CIPHER", b"x", "TLS below 1.3"),
        (b"HTTP_REQUEST", b"x", "plain text"),
        (b"TLSV1_ALERT_UNKNOWN_CA", b"x", "refused this node's certificate"),
        (b"SOME_NEW_REASON", b"chosen by a \x1b[31mstranger", "some new reason"),
    ],
)
def test_each_failure_has_its_own_words(word, more, reason):
    said = translate(LINE % (word, more))
    assert reason in said and said.isprintable()


def test_lines_of_others_pass_and_other_lines_of_grpc_do_not():
    sink = io.BytesIO()
    one = Filter(sink)
    other = b"terminate called after throwing an instance of 'std::runtime_error'\n"
    for line in (other, b"W1130 00:09:23.608855   27779 log.cc:102] Log level INFO\n", b"half"):
        one.take(line, 0.0)
    assert sink.getvalue() == other + b"half"


def test_a_flood_is_counted():
    sink = io.BytesIO()
    one = Filter(sink)
    for _ in range(LINES_PER_SECOND + 7):
        one.take(LINE % (b"HTTP_REQUEST", b"x"), 100.5)
    assert sink.getvalue().count(b"\n") == LINES_PER_SECOND
    one.take(LINE % (b"HTTP_REQUEST", b"x"), 101.0)
    assert b"handshake: 7 more\n" in sink.getvalue()
    assert sink.getvalue().count(b"\n") == LINES_PER_SECOND + 2


NODE = """
    import sys
    from node.config import prepare_process, let_grpc_speak
    prepare_process()
    let_grpc_speak()
    import asyncio, logging, os
    from types import SimpleNamespace
    from pathlib import Path
    from node.handshakes import handshakes_heard
    sys.path.insert(0, {support!r})
    ssl_words = {words!r}
    from trust_support import server
    world = SimpleNamespace(credentials=lambda name: Path({folder!r}))

    async def work():
        async with server(world) as address:
            print(address.port, flush=True)
            await asyncio.to_thread(sys.stdin.readline)

    with handshakes_heard():
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        asyncio.run(work())
        os.write(2, b"last words of native code\\n")
    # Descriptor 2 is standard error again, whatever gRPC wrote on it.
    os.write(2, ssl_words)
"""


def shake(port: int, folder: Path | None, **changes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    for name, value in changes.items():
        setattr(context, name, value)
    if folder is not None:
        context.load_cert_chain(folder / enroll.NODE_CERTIFICATE, folder / enroll.NODE_KEY)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
            context.wrap_socket(raw) as tls,
        ):
            tls.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            tls.recv(9)
    except OSError:
        return


def test_a_node_says_why_it_refused_a_handshake_and_the_wire_does_not(tmp_path):
    def long_ago():
        return utc_now().replace(year=utc_now().year - 2)

    for name, now in (("node", utc_now), ("late", long_ago)):
        enroll.enroll(tmp_path / "authority", tmp_path / name, name, now)
    enroll.enroll(tmp_path / "other-authority", tmp_path / "foreign", "foreign")
    late = (tmp_path / "late" / enroll.NODE_CERTIFICATE).read_bytes()
    pin(tmp_path / "node", late, Role.CLIENT)
    script = textwrap.dedent(NODE).format(
        words=LINE % (b"PASSED_BY", b"the filter"),
        support=str(Path(__file__).parent),
        folder=str(tmp_path / "node"),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    port = int(process.stdout.readline())
    shake(port, None)
    shake(port, tmp_path / "foreign")
    shake(port, tmp_path / "late")
    shake(port, tmp_path / "node", maximum_version=ssl.TLSVersion.TLSv1_2)
    _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    refused = [line.split("refused in the handshake: ")[1] for line in errors.splitlines()
               if "refused in the handshake" in line]  # fmt: skip
    assert refused == [
        "no certificate",
        "its certificate is of another authority",
        "its certificate has expired",
        "TLS below 1.3",
    ]
    assert "WARNING node.handshakes: refused" in errors
    # Known before anybody called: the pin itself has expired.
    assert "late is pinned, and refused: expired on" in errors
    assert "last words of native code" in errors
    assert errors.count("ssl_transport") == 1 and "PASSED_BY: the filter" in errors
