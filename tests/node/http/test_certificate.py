"""HTTPS certificates that are renewed while a node serves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import os
import ssl
from pathlib import Path

import pytest

from node import enroll, files
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


class Shaken:
    """A connection of which only the context matters."""

    context = None


def late(chain, key):
    """A live certificate whose files are looked at in every handshake."""
    return LiveCertificate(chain, key, clock_s=iter(range(0, 100, 2)).__next__)


@pytest.mark.parametrize("call", ["open", "fdopen"])
def test_a_look_that_fails_in_passing_loses_no_renewal(leaf, monkeypatch, caplog, call):
    live = late(leaf.certificate, leaf.key)
    before = live._present
    leaf.renew()

    class Broken(io.BytesIO):
        def __init__(self, descriptor, _mode):
            super().__init__()
            self.descriptor = descriptor

        def fileno(self):
            return self.descriptor

        def read(self, _=-1):
            os.close(self.descriptor)
            raise OSError(errno.EIO, "of the disk")

    def no_descriptors(*_):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(f"node.files.os.{call}", {"open": no_descriptors, "fdopen": Broken}[call])
        for _ in range(2):
            live._hand_over(Shaken, None, live.context)
            assert Shaken.context is before
    assert caplog.text.count("the last good certificate stays in use") == 1
    live._hand_over(Shaken, None, live.context)
    assert Shaken.context is not before


def test_a_certificate_and_its_key_may_be_links_to_files_that_would_do(leaf, tmp_path):
    """As certbot keeps them: links that lead to the newest pair."""
    folder = tmp_path / "live"
    folder.mkdir()
    for number in (1, 2):
        for path in (leaf.certificate, leaf.key):
            path.rename(tmp_path / f"{number}-{path.name}")
        leaf.renew()
    chain, key = folder / "fullchain.pem", folder / "privkey.pem"

    def lead(number):
        for link, name in ((chain, "cert.pem"), (key, "key.pem")):
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{number}-{name}")

    lead(1)
    live = late(chain, key)
    before = live._present
    lead(2)
    live._hand_over(Shaken, None, live.context)
    assert Shaken.context is not before
    # What it leads to must do as a plain file must.
    (tmp_path / "2-key.pem").chmod(0o640)
    with pytest.raises(CredentialsError, match="too open"):
        LiveCertificate(chain, key)
    key.unlink()
    os.mkfifo(tmp_path / "pipe", 0o600)
    key.symlink_to("../pipe")
    with pytest.raises(CredentialsError, match="regular"):
        LiveCertificate(chain, key)
    # Whatever else is read stays without links.
    with pytest.raises(CredentialsError, match="cannot be opened"):
        files.read_public(chain)
