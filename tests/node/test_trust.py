"""Who is let in: certificates, pins, roles, TLS versions, and the files they live in."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import socket
import ssl
import stat

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from node_support import run
from trust_support import channel_of, code_of, codes, server

from node import enroll, trust
from node.config import Address
from node.errors import CredentialsError
from node.files import read_private, write_private
from node.pb.v1 import migration_pb2_grpc, session_pb2, session_pb2_grpc

_C = grpc.StatusCode


def test_each_role_reaches_its_own_service_and_a_stranger_none(world, caplog):
    async def work():
        async with server(world) as address:
            return [await codes(world, name, address) for name in ("client", "target", "stranger")]

    with caplog.at_level(logging.WARNING):
        client, node, stranger = run(work())
    refused = (_C.PERMISSION_DENIED, "refused")
    # An empty Session servicer answers UNIMPLEMENTED: the call got through the gate.
    assert client[0][0] is _C.OK and client[1] == refused and client[2][0] is _C.UNIMPLEMENTED
    assert node[0][0] is _C.OK and node[2] == refused and node[1][0] is _C.INVALID_ARGUMENT
    assert stranger == (refused, refused, refused)
    assert "is not pinned" in caplog.text and "/node.v1.Session/Describe" in caplog.text


def test_streams_are_closed_to_strangers_too(world):
    async def work():
        async with server(world) as address, channel_of(world, "stranger", address) as channel:
            call = migration_pb2_grpc.MigrationStub(channel).Push(timeout=5)
            with pytest.raises(grpc.aio.AioRpcError) as pushed:
                await call
            with pytest.raises(grpc.aio.AioRpcError) as generated:
                stub = session_pb2_grpc.SessionStub(channel)
                async for _ in stub.Generate(session_pb2.GenerateRequest(), timeout=5):
                    raise AssertionError
            return pushed.value.code(), generated.value.code()

    assert run(work()) == (_C.PERMISSION_DENIED, _C.PERMISSION_DENIED)


def test_every_service_of_a_node_is_in_the_policy_and_others_are_closed(world):
    credentials = trust.LiveCredentials(world.credentials("source"))
    gate = trust.Gate(credentials)

    class Context:
        def auth_context(self):
            return {"x509_pem_cert": [world.certificate("client")]}

    assert gate.admit("/node.v1.Session/Open", Context()).name == "client"
    for method in ("/node.v1.Other/Open", "/Open", "", "//node.v1.Session/Open/x"):
        with pytest.raises(trust.PeerRefusedError):
            gate.admit(method, Context())


def _handshake(address: Address, context: ssl.SSLContext) -> str:
    with socket.create_connection((address.host, address.port), timeout=5) as raw:
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(raw) as tls:
            tls.settimeout(5)
            # A refused client certificate shows on the first read in TLS 1.3.
            tls.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            return f"{tls.version()} {len(tls.recv(9))}"


def _client_context(world, caller: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if caller is not None:
        folder = world.credentials(caller)
        context.load_cert_chain(folder / enroll.NODE_CERTIFICATE, folder / enroll.NODE_KEY)
    return context


def test_only_tls_1_3_with_a_certificate_of_the_authority_gets_through(world, tmp_path):
    enroll.enroll(tmp_path / "other-authority", tmp_path / "other-credentials", "client")

    async def work():
        async with server(world) as address:
            newest = await asyncio.to_thread(_handshake, address, _client_context(world, "client"))
            refused = []
            old = _client_context(world, "client")
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            other = _client_context(world, None)
            folder = tmp_path / "other-credentials"
            other.load_cert_chain(folder / enroll.NODE_CERTIFICATE, folder / enroll.NODE_KEY)
            for context in (old, _client_context(world, None), other):
                try:
                    said = await asyncio.to_thread(_handshake, address, context)
                    refused.append(said.endswith(" 0"))
                except OSError:
                    refused.append(True)
            return newest, refused

    newest, refused = run(work())
    assert newest == "TLSv1.3 9"
    assert refused == [True, True, True]


def test_plain_text_gets_no_answer(world):
    async def work():
        async with server(world) as address, grpc.aio.insecure_channel(str(address)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return (await code_of(stub.Check, health_pb2.HealthCheckRequest()))[0]

    assert run(work()) is _C.UNAVAILABLE


def test_a_client_refuses_a_server_with_another_leaf_of_the_same_name_and_authority(world):
    async def work():
        impostor = world.root / "impostor-credentials"
        enroll.enroll(world.root / "authority", impostor, "source")
        async with server(world, "impostor") as address:
            return await codes(world, "client", address)

    assert {code for code, _ in run(work())} == {_C.UNAVAILABLE}


def test_a_client_refuses_a_pinned_node_under_another_name(world):
    async def work():
        async with server(world, "target") as address:
            return await codes(world, "client", address)

    assert {code for code, _ in run(work())} == {_C.UNAVAILABLE}


def test_an_expired_client_certificate_is_refused(world):
    def long_ago():
        return enroll.utc_now() - datetime.timedelta(days=400)

    folder = world.root / "late-credentials"
    enroll.enroll(world.root / "authority", folder, "late", now=long_ago)
    trust.pin(folder, world.certificate("source"), trust.Role.NODE)
    trust.pin(world.credentials("source"), world.certificate("late"), trust.Role.CLIENT)

    async def work():
        async with server(world) as address:
            return await codes(world, "late", address)

    assert {code for code, _ in run(work())} == {_C.UNAVAILABLE}


def test_keys_and_folders_are_private_whatever_the_umask(tmp_path):
    for umask in (0o000, 0o077):
        old = os.umask(umask)
        try:
            folder = tmp_path / f"credentials-{umask}"
            enroll.enroll(tmp_path / f"authority-{umask}", folder, "one")
        finally:
            os.umask(old)
        for path in (folder, tmp_path / f"authority-{umask}"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            for file in path.iterdir():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_key_is_never_replaced_and_never_written_through_a_link(tmp_path):
    folder = tmp_path / "credentials"
    enroll.enroll(tmp_path / "authority", folder, "one")
    before = (folder / enroll.NODE_KEY).read_bytes()
    with pytest.raises(CredentialsError, match="exists"):
        enroll.enroll(tmp_path / "authority", folder, "one")
    assert (folder / enroll.NODE_KEY).read_bytes() == before
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(CredentialsError):
        write_private(tmp_path / "link", b"secret")
    assert (tmp_path / "victim").read_text() == "as it was"


def test_credentials_that_are_open_links_or_mixed_up_are_refused(world, tmp_path):
    folder = world.credentials("source")
    key = folder / enroll.NODE_KEY
    key.chmod(0o640)
    with pytest.raises(CredentialsError, match="too open"):
        trust.load_credentials(folder)
    key.chmod(0o600)
    content = key.read_bytes()
    key.unlink()
    with pytest.raises(CredentialsError, match="cannot be opened"):
        trust.load_credentials(folder)
    (tmp_path / "elsewhere.pem").write_bytes(content)
    (tmp_path / "elsewhere.pem").chmod(0o600)
    key.symlink_to(tmp_path / "elsewhere.pem")
    with pytest.raises(CredentialsError, match="cannot be opened"):
        trust.load_credentials(folder)
    key.unlink()
    os.mkfifo(key, 0o600)
    with pytest.raises(CredentialsError, match="regular"):
        read_private(key)
    key.unlink()
    write_private(key, (world.credentials("target") / enroll.NODE_KEY).read_bytes())
    with pytest.raises(CredentialsError, match="not for the key"):
        trust.load_credentials(folder)


def test_names_that_are_no_dns_labels_are_refused(tmp_path):
    for name in ("", "A", "a b", "../a", "a.b", "-a", "a" * 64, "ä", "a\n"):
        with pytest.raises(CredentialsError):
            enroll.make_request(tmp_path / "c", name)
    assert not (tmp_path / "c").exists()


def test_a_request_whose_signature_was_changed_is_not_signed(tmp_path):
    enroll.make_authority(tmp_path / "authority")
    request = enroll.make_request(tmp_path / "c", "one")
    assert enroll.sign_request(tmp_path / "authority", request)
    lines = request.splitlines()
    body = bytearray(lines[2])
    body[10] = ord("A") if body[10] != ord("A") else ord("B")
    lines[2] = bytes(body)
    with pytest.raises(CredentialsError):
        enroll.sign_request(tmp_path / "authority", b"\n".join(lines))


def test_secrets_do_not_show_in_a_repr(world):
    credentials = trust.load_credentials(world.credentials("source"))
    assert b"PRIVATE" in credentials.key_pem
    assert "PRIVATE" not in repr(credentials)
