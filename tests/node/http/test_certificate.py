"""HTTPS certificates that are renewed while a node serves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from pathlib import Path

import pytest

from node import enroll
from node.config import Address
from node.errors import CredentialsError
from node.http import certificate
from node.http.certificate import LiveCertificate
from node.http.listen import listening
from node.http.options import HttpOptions


class Leaf:
    """Certificate and key under two names, for a pair that others take the place of."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, 0
        self.certificate, self.key = root / "cert.pem", root / "key.pem"
        self.renew()

    def renew(self) -> None:
        """Another pair, each file in the place of the one before."""
        self.made += 1
        folder = self.root / f"leaf-{self.made}"
        enroll.enroll(self.root / "authority", folder, "localhost")
        (folder / enroll.NODE_CERTIFICATE).replace(self.certificate)
        (folder / "node-key.pem").replace(self.key)

    def digest(self) -> str:
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return hashlib.sha256(der).hexdigest()


@pytest.fixture
def leaf(tmp_path):
    return Leaf(tmp_path)


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def connect(port: int, name: str | None = "localhost"):
    """A connection, and the digest of the certificate that it was shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    named = {} if name is None else {"server_hostname": name}
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, **(named or {"server_hostname": ""})
    )
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return reader, writer, hashlib.sha256(der).hexdigest()


async def ask(reader, writer) -> bytes:
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await writer.drain()
    return await reader.readuntil(b"hello\r\n0\r\n\r\n")


async def shown(port: int, name: str | None = "localhost") -> str:
    reader, writer, digest = await connect(port, name)
    assert b"200" in await ask(reader, writer)
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError):
        await writer.wait_closed()
    return digest


def test_a_renewed_certificate_is_used_from_the_next_connection_on(leaf, monkeypatch, caplog):
    monkeypatch.setattr(certificate, "LOOK_S", 0.0)
    options = HttpOptions(
        Address("127.0.0.1", 0), tls_certificate=leaf.certificate, tls_key=leaf.key
    )

    async def work():
        async with listening(options, hello) as address:
            first = leaf.digest()
            assert await shown(address.port) == first
            reader, writer, _ = await connect(address.port)
            leaf.renew()
            assert leaf.digest() != first
            # Also where the client says no name, and old connections go on.
            assert await shown(address.port) == await shown(address.port, None) == leaf.digest()
            assert b"200" in await ask(reader, writer)
            writer.close()
            # What cannot be used changes nothing, and is said once.
            good = leaf.digest()
            caplog.clear()
            leaf.key.chmod(0o644)
            assert await shown(address.port) == await shown(address.port) == good
            assert caplog.text.count("the last good certificate stays in use") == 1
            leaf.key.chmod(0o600)
            whole = leaf.certificate.read_bytes()
            leaf.certificate.write_bytes(whole[:100])
            assert await shown(address.port) == good
            leaf.certificate.unlink()
            assert await shown(address.port) == good
            leaf.renew()
            assert await shown(address.port) == leaf.digest() != good

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_certificate_of_another_key_is_not_taken(leaf, caplog):
    live = LiveCertificate(leaf.certificate, leaf.key, clock_s=iter(range(0, 100, 2)).__next__)
    before = live._present
    other = leaf.key.read_bytes()
    leaf.renew()
    leaf.key.write_bytes(other)

    class Connection:
        context = None

    live._hand_over(Connection, None, live.context)
    assert Connection.context is before
    assert "the last good certificate stays in use" in caplog.text


def test_files_are_looked_at_once_a_second(leaf, monkeypatch):
    times = iter([0.0, 0.5, 0.9, 1.0, 1.9])
    live = LiveCertificate(leaf.certificate, leaf.key, clock_s=lambda: next(times))
    looks = []
    monkeypatch.setattr(live, "_look", lambda: looks.append(1))

    class Connection:
        context = None

    for _ in range(4):
        live._hand_over(Connection, "localhost", live.context)
    assert len(looks) == 1


def test_a_pair_that_cannot_be_used_to_begin_with_is_an_error(leaf):
    leaf.key.write_bytes(b"no key")
    with pytest.raises(CredentialsError, match="no certificate and its key"):
        LiveCertificate(leaf.certificate, leaf.key)
