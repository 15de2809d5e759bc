"""Certificates and pins that change while a node runs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import threading
from pathlib import Path

import grpc
import pytest
from node_support import move, prompt, run
from trust_support import ask, channel_of, codes, knock, server

from node import certificates, enroll, trust
from node.errors import CredentialsError
from node.files import write_private
from node.pb.v1 import migration_pb2, migration_pb2_grpc
from node.trust import LiveCredentials, Role, load_credentials, pin, unpin

OK = grpc.StatusCode.OK
DENIED = grpc.StatusCode.PERMISSION_DENIED
CLOSED = grpc.StatusCode.UNAVAILABLE


def renew(world, name: str) -> bytes:
    """A new key and certificate for ``name``; gives the new leaf."""
    folder, authority = world.credentials(name), world.root / "authority"
    leaf = enroll.sign_request(authority, enroll.renew_request(folder))
    enroll.accept(folder, leaf, (authority / enroll.AUTHORITY_CERTIFICATE).read_bytes())
    return leaf


def in_days(days: float):
    """A clock that many days ahead."""
    return lambda: certificates.utc_now() + datetime.timedelta(days=days)


def test_a_peer_pinned_while_the_node_runs_gets_through_and_an_unpinned_one_stops(world):
    source, stranger = world.credentials("source"), world.certificate("stranger")

    async def work():
        async with server(world) as address, channel_of(world, "stranger", address) as channel:
            before = (await ask(channel))[0]
            pin(source, stranger, Role.CLIENT)
            pinned = (await ask(channel))[0]
            unpin(source, "stranger", Role.CLIENT)
            # The same connection, and a new one.
            return before, pinned, (await ask(channel))[0], await knock(world, "stranger", address)

    assert run(work()) == (DENIED, OK, DENIED, DENIED)


def test_a_stream_ends_soon_after_its_peer_was_unpinned(world, monkeypatch):
    monkeypatch.setattr(trust, "STREAM_AGE_S", 0.0)
    arrived = asyncio.Event()
    piece = migration_pb2.Piece(open=migration_pb2.TransferRef(epoch=1, number=1))

    async def read_on(self, pieces, context):
        async for _ in pieces:
            arrived.set()

    monkeypatch.setattr("node.migration_service.MigrationService.push", read_on)

    async def work():
        async with server(world) as address, channel_of(world, "target", address) as channel:
            call = migration_pb2_grpc.MigrationStub(channel).Push(timeout=10)
            await call.write(piece)
            await arrived.wait()
            unpin(world.credentials("source"), "target", Role.NODE)
            # How a write meets the end of a call differs; the call's own end does not.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await call.write(piece)
                    await asyncio.sleep(0.01)
            return await call.code(), await call.details()

    assert run(work()) == (DENIED, "refused")


def test_a_renewed_certificate_is_served_without_a_restart(world):
    async def work():
        async with server(world) as address, channel_of(world, "client", address) as channel:
            first = (await ask(channel))[0]
            leaf = renew(world, "source")
            not_known_yet = await knock(world, "client", address)
            with pytest.raises(CredentialsError, match="--renewed"):
                pin(world.credentials("client"), leaf, Role.NODE)
            pin(world.credentials("client"), leaf, Role.NODE, beside_old=True)
            renewed = await knock(world, "client", address)
            # A connection that was open all the time goes on.
            return first, not_known_yet, renewed, (await ask(channel))[0]

    assert run(work()) == (OK, CLOSED, OK, OK)


def test_a_leaf_pinned_ahead_lets_a_server_renew_without_a_gap(world):
    source, authority = world.credentials("source"), world.root / "authority"

    async def work():
        async with server(world) as address:
            leaf = enroll.sign_request(authority, enroll.renew_request(source))
            pin(world.credentials("client"), leaf, Role.NODE, beside_old=True)
            before = await knock(world, "client", address)
            enroll.accept(source, leaf, (authority / enroll.AUTHORITY_CERTIFICATE).read_bytes())
            return before, await knock(world, "client", address)

    assert run(work()) == (OK, OK)


def test_a_caller_pinned_with_both_leaves_renews_without_a_gap(world):
    source = world.credentials("source")
    old = world.certificate("client")

    async def work():
        async with server(world) as address, channel_of(world, "client", address) as channel:
            leaf = renew(world, "client")
            unknown = await knock(world, "client", address)
            pin(source, leaf, Role.CLIENT, beside_old=True)
            both = await knock(world, "client", address), (await ask(channel))[0]
            digest = certificates.leaf_digest(old).hex()
            assert len(unpin(source, "client", Role.CLIENT, digest[:12])) == 1
            after = await knock(world, "client", address), (await ask(channel))[0]
            return unknown, both, after

    assert run(work()) == (DENIED, (OK, OK), (OK, DENIED))


def test_no_call_fails_through_rotations_and_nothing_piles_up(world):
    authority, client = world.root / "authority", world.credentials("client")
    root = (authority / enroll.AUTHORITY_CERTIFICATE).read_bytes()

    def held() -> tuple[int, int]:
        # Linux and macOS both list a process's descriptors in /dev/fd.
        return len(list(Path("/dev/fd").iterdir())), threading.active_count()

    async def turn(address, name, other, role) -> None:
        """One side renews: its next leaf is pinned ahead, the old one unpinned afterwards."""
        old = certificates.leaf_digest(world.certificate(name)).hex()
        leaf = enroll.sign_request(authority, enroll.renew_request(world.credentials(name)))
        pin(other, leaf, role, beside_old=True)
        assert await knock(world, "client", address) is OK
        enroll.accept(world.credentials(name), leaf, root)
        assert await knock(world, "client", address) is OK
        unpin(other, name, role, old)
        assert await knock(world, "client", address) is OK

    async def work():
        async with server(world) as address:
            counts = []
            for _ in range(5):
                await turn(address, "source", client, Role.NODE)
                await turn(address, "client", world.credentials("source"), Role.CLIENT)
                counts.append(held())
            return counts

    counts = run(work())
    # The first round may still open what stays open.
    assert max(fds for fds, _ in counts[2:]) <= counts[1][0] + 2, counts
    assert max(threads for _, threads in counts[2:]) <= counts[1][1] + 1, counts


def test_a_third_leaf_of_one_name_is_not_pinned(world):
    folder = world.credentials("source")
    for last in (False, True):
        leaf = renew(world, "client")
        if last:
            with pytest.raises(CredentialsError, match="unpin one first"):
                pin(folder, leaf, Role.CLIENT, beside_old=True)
        else:
            pin(folder, leaf, Role.CLIENT, beside_old=True)
            # Once more changes nothing.
            pin(folder, leaf, Role.CLIENT)
    assert len(list((folder / "clients").iterdir())) == 2
    with pytest.raises(CredentialsError, match="no pinned certificate"):
        unpin(folder, "client", Role.NODE)


def test_a_pin_that_cannot_be_read_lets_nobody_in_and_stops_nothing(world, caplog):
    folder = world.credentials("source")
    live = LiveCredentials(folder)
    assert {peer.name for peer in live.current().peers} == {"client", "target", "third"}
    (folder / "nodes" / "third.pem").write_bytes(b"not a certificate")
    assert {peer.name for peer in live.current().peers} == {"client", "target"}
    (folder / "nodes").chmod(0o750)
    assert {peer.name for peer in live.current().peers} == {"client"}
    (folder / "nodes").chmod(0o700)
    assert {peer.name for peer in live.current().peers} == {"client", "target"}
    assert "its file is broken" in caplog.text and "nobody is pinned under nodes/" in caplog.text
    caplog.clear()
    live.current()
    assert not caplog.records


def test_a_certificate_that_cannot_be_read_leaves_the_last_good_one(world, caplog):
    folder = world.credentials("source")
    live = LiveCredentials(folder)
    before = live.current()
    key = folder / enroll.NODE_KEY
    good = key.read_bytes()
    key.unlink()
    assert live.current() == before and "last good" in caplog.text
    write_private(key, good)
    leaf = renew(world, "source")
    assert live.current().certificate_pem == leaf
    foreign = world.credentials("target")
    (folder / enroll.NODE_CERTIFICATE).write_bytes(world.certificate("target"))
    key.write_bytes((foreign / enroll.NODE_KEY).read_bytes())
    assert live.current().name == "source" and "a certificate of target" in caplog.text


def test_a_look_within_its_age_reads_nothing(world):
    moments = [0.0]
    live = LiveCredentials(world.credentials("source"), lambda: moments[0])
    unpin(world.credentials("source"), "third", Role.NODE)
    assert len(live.current(max_age_s=1.0).peers) == 3
    moments[0] = 1.0
    assert len(live.current(max_age_s=1.0).peers) == 2


@pytest.mark.parametrize("done", ["request", "certificate", "all"])
def test_a_renewal_cut_at_any_point_leaves_a_usable_folder(world, done, monkeypatch):
    folder, authority = world.credentials("source"), world.root / "authority"
    before = load_credentials(folder)
    request = enroll.renew_request(folder)
    assert load_credentials(folder) == before
    leaf = enroll.sign_request(authority, request)
    if done == "request":
        # Asked again, the same key is meant.
        again = certificates.load_request(enroll.renew_request(folder))
        assert again.public_key() == certificates.load_request(request).public_key()
        return
    root = (authority / enroll.AUTHORITY_CERTIFICATE).read_bytes()
    if done == "certificate":
        with monkeypatch.context() as cut:
            cut.setattr(enroll, "finish_renewal", lambda folder: None)
            enroll.accept(folder, leaf, root)
        assert (folder / enroll.NEXT_KEY).exists()
        assert load_credentials(folder).certificate_pem == leaf
    enroll.accept(folder, leaf, root)
    after = load_credentials(folder)
    assert after.certificate_pem == leaf and after.key_pem != before.key_pem
    assert not (folder / enroll.NEXT_KEY).exists()


def test_each_refusal_has_its_own_reason_in_the_log_and_none_on_the_wire(world, caplog):
    impostor = world.root / "impostor-credentials"
    enroll.enroll(world.root / "authority", impostor, "client")
    pin(impostor, world.certificate("source"), Role.NODE)
    said = {}

    async def work():
        async with server(world) as address:
            for caller in ("stranger", "impostor", "client"):
                caplog.clear()
                answers = await codes(world, caller, address)
                said[caller] = caplog.text
                refused = [answer for answer in answers if answer[0] is DENIED]
                assert refused and all(text == "refused" for _, text in refused)
        async with server(world, now=in_days(366)) as address:
            caplog.clear()
            assert await knock(world, "client", address) is DENIED
            said["expired"] = caplog.text
        async with server(world, now=in_days(-1)) as address:
            caplog.clear()
            assert await knock(world, "client", address) is DENIED
            said["early"] = caplog.text

    with caplog.at_level(logging.WARNING):
        run(work())
    assert "it says stranger, which is unknown here" in said["stranger"]
    assert "it says client, whose pinned leaf is another" in said["impostor"]
    assert "client is not pinned for it, only under clients/" in said["client"]
    assert "certificate of client: expired on" in said["expired"]
    assert "certificate of client: not valid before" in said["early"]


def test_a_pinned_certificate_that_has_expired_is_named_when_it_is_loaded(world, caplog):
    folder = world.root / "late-credentials"
    enroll.enroll(world.root / "authority", folder, "late", now=in_days(-400))
    pin(world.credentials("source"), world.certificate("late"), Role.CLIENT)
    LiveCredentials(world.credentials("source"))
    assert "late is pinned, and refused: expired on" in caplog.text
    LiveCredentials(folder)
    assert "this certificate is refused by every peer: expired on" in caplog.text


def test_a_running_node_moves_sessions_with_the_certificate_that_it_has_now(world):
    old = certificates.leaf_digest(world.certificate("source")).hex()

    async def work():
        async with world.pair() as (_, giving, target, _):
            session = await giving.append(await giving.open("s"), prompt(20))
            leaf = renew(world, "source")
            pin(world.credentials("target"), leaf, Role.NODE, beside_old=True)
            unpin(world.credentials("target"), "source", Role.NODE, old)
            return await move(giving, target, session)

    assert run(work()) is not None
