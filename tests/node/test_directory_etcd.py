"""What is an etcd's alone: addresses, certificates, replies that get lost, silence, compaction."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from directory_support import nonce
from etcd3aio.kv import KVService
from etcd_support import EtcdPlace, free_ports

from node import directory_etcd, etcd_cluster
from node.directory import Ownership, open_directory, settle, transfer_settled
from node.directory_etcd import EtcdDirectory
from node.directory_etcd_keys import Identity, encoded, end_of, key_values, read_identity
from node.enroll import enroll
from node.errors import (
    CredentialsError,
    DirectoryAmbiguousError,
    DirectoryError,
    DirectoryWentBackError,
    StaleTokenError,
    UsageError,
)
from node.etcd import Etcd, EtcdLost, get, put
from node.etcd_address import EtcdAddress
from node.trust import LiveCredentials


@pytest.fixture
def place(etcds, parties, tmp_path):
    return EtcdPlace(etcds, parties, f"tests/{tmp_path.name}")


# --- Addresses. ---


def test_addresses_say_members_prefix_and_certificates(tmp_path):
    address = EtcdAddress.parse("etcd://a,b:1,[::1],[::2]:3?prefix=x/y&server_name=n")
    assert [str(one) for one in address.members] == ["a:2379", "b:1", "[::1]:2379", "[::2]:3"]
    assert (address.prefix, address.server_name, address.plain) == ("x/y", "n", False)
    assert EtcdAddress.parse("etcd://127.0.0.1,[::1]:2,localhost?tls=off").plain
    assert EtcdAddress.parse("etcd://a?ca=1&cert=2&key=3").files.key.name == "3"
    assert EtcdAddress.parse("etcd://a").inside("b").prefix == "kvpack/b"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("etcd://", "expected etcd://"),
        ("etcd:a", "expected etcd://"),
        ("etcd://user:word@a", "expected etcd://"),
        ("etcd://a/b", "expected etcd://"),
        ("etcd://a,", "HOST:PORT"),
        ("etcd://a:0", "port of 1"),
        ("etcd://a,a", "named twice"),
        ("etcd://" + ",".join(f"m{i}" for i in range(10)), "1 to 9 members"),
        ("etcd://a?prefix=/x", "prefix"),
        ("etcd://a?prefix=x/../y", "prefix"),
        ("etcd://a?prefix=" + "x" * 201, "prefix"),
        ("etcd://a?speed=1", "unknown 'speed'"),
        ("etcd://a?prefix=", "without a value"),
        ("etcd://a?prefix=x&prefix=y", "given twice"),
        ("etcd://a?x", "name=value"),
        ("etcd://a?tls=on", "unless it says tls=off"),
        ("etcd://10.0.0.1?tls=off", "loopback only"),
        ("etcd://127.0.0.1,a?tls=off", "loopback only"),
        ("etcd://127.0.0.1?tls=off&server_name=a", "exclude each other"),
        ("etcd://a?ca=1", "together"),
        ("etcd://a", "needs this node's credentials"),
    ],
)
def test_bad_addresses_say_what_is_wrong(url, why):
    with pytest.raises(UsageError, match=why):
        open_directory(url)


def test_certificate_files_must_be_there_be_pem_and_be_private(etcds, tmp_path):
    def url(**files):
        names = {"ca": etcds.tls / "ca.pem", "cert": etcds.tls / "cert.pem", **files}
        return "etcd://a?" + "&".join(f"{name}={path}" for name, path in names.items())

    open_copy = tmp_path / "open.pem"
    open_copy.write_bytes((etcds.tls / "key.pem").read_bytes())
    open_copy.chmod(0o644)
    text = tmp_path / "text.pem"
    text.write_text("none")
    for key, why in ((open_copy, "everybody"), (text, "expected PEM"), (tmp_path / "x", "No such")):
        with pytest.raises(CredentialsError, match=why):
            open_directory(url(key=key))


# --- Certificates. ---


def run_at(etcds, url, work, credentials=None):
    async def bounded():
        directory = open_directory(url, credentials)
        try:
            async with asyncio.timeout(30):
                return await work(directory)
        finally:
            await directory.close()

    return asyncio.run(bounded())


def test_a_stranger_is_refused_and_a_stranger_of_ours_is_not_believed(etcds, tmp_path, monkeypatch):
    monkeypatch.setattr(etcd_cluster, "LOOK_S", 0.6)
    enroll(tmp_path / "authority", tmp_path / "x", "x")
    own, other = etcds.tls, tmp_path / "x"
    certificates = {"cert": other / "node-cert.pem", "key": other / "node-key.pem"}
    for files in (
        {"ca": own / "ca.pem", **certificates},
        {"ca": other / "ca-cert.pem", "cert": own / "cert.pem", "key": own / "key.pem"},
    ):
        url = f"etcd://127.0.0.1:{etcds.members[0].client}?" + "&".join(
            f"{name}={path}" for name, path in files.items()
        )
        with pytest.raises(DirectoryError):
            run_at(etcds, url, lambda directory: directory.owner("s"))


def test_another_server_name_than_the_certificates_is_refused(etcds, parties, monkeypatch):
    monkeypatch.setattr(etcd_cluster, "LOOK_S", 0.6)
    where = f"etcd://127.0.0.1:{etcds.members[0].client}?prefix=tests/names&server_name="
    credentials = LiveCredentials(parties / "a")

    async def state(directory):
        return await directory.state()

    assert run_at(etcds, f"{where}etcd", state, credentials).generation == 1
    with pytest.raises(DirectoryError):
        run_at(etcds, f"{where}other", state, credentials)


def test_renewed_certificates_are_used_from_the_next_call_on(place, parties):
    async def work():
        directory = place.directory()
        await directory.state()
        (first,) = directory.cluster._open.values()
        renewed = LiveCredentials(parties / "b").current()
        directory.cluster._source._credentials = renewed
        await directory.state()
        (second,) = directory.cluster._open.values()
        assert first is not second and len(directory.cluster._closing) == 1
        await directory.close()

    asyncio.run(work())


# --- Members. ---


def test_a_member_that_is_away_is_passed_over_by_looks_and_leaves_one_write_open(etcds, tmp_path):
    (dead,) = free_ports(1)
    live = etcds.url(prefix=f"tests/{tmp_path.name}")
    url = live.replace("etcd://", f"etcd://127.0.0.1:{dead},")

    async def work(directory):
        with pytest.raises(DirectoryAmbiguousError):
            await directory.cluster.swap((), [put("tests/x", b"")])
        directory.cluster._asked = 0
        token = await directory.claim("s", "a", nonce(1))
        assert (await directory.owner("s")).token == token

    run_at(etcds, url, work)


def test_a_silent_etcd_ends_looks_with_an_error_and_leaves_writes_open(place, monkeypatch):
    for name, seconds in (("LOOK_S", 0.8), ("TRY_S", 0.3), ("WRITE_S", 0.6)):
        monkeypatch.setattr(etcd_cluster, name, seconds)

    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        with place.etcds.frozen():
            begun_s = time.monotonic()
            with pytest.raises(DirectoryError) as looked:
                await directory.owner("s")
            assert not isinstance(looked.value, DirectoryAmbiguousError)
            with pytest.raises(DirectoryAmbiguousError):
                # The etcd has it, and does it as soon as it wakes.
                await directory.cluster.swap((), [put("tests/late", b"")])
            assert time.monotonic() - begun_s < 15.0
        async with asyncio.timeout(30):
            new = await settle(directory, "s", token, "b", nonce(2))
        assert (await directory.owner("s")).token == new

    place.run(work)


@pytest.mark.parametrize("done", [True, False])
def test_a_reply_that_is_lost_on_the_way_is_settled_by_nonce(place, monkeypatch, done):
    real, lose = Etcd.txn, []

    async def txn(member, compares, then, otherwise, timeout_s):
        if lose and then and compares:
            lose.clear()
            if done:
                await real(member, compares, then, otherwise, timeout_s)
            raise EtcdLost("the reply was lost")
        return await real(member, compares, then, otherwise, timeout_s)

    monkeypatch.setattr(Etcd, "txn", txn)

    async def work(directory):
        lose.append(1)
        with pytest.raises(DirectoryAmbiguousError, match="was lost"):
            await directory.claim("s", "a", nonce(1))
        first = await directory.claim("s", "a", nonce(1))
        lose.append(1)
        second = await transfer_settled(directory, "s", first, "b", nonce(2))
        assert (await directory.owner("s")).token == second
        lose.append(1)
        with pytest.raises(DirectoryAmbiguousError):
            await directory.release("s", second)
        await directory.release("s", second)
        assert (await directory.owner("s")).token == second
        # Entry, index and tombstone were written together, each once.
        assert await directory.owned_by("a") == await directory.owned_by("b") == []

    place.run(work)


# --- Watching. ---


async def compact(directory, revision):
    channel = directory.cluster._member()._channel
    await KVService(channel).compact(revision, physical=True, timeout=5)


def test_a_watch_from_a_revision_that_was_compacted_away_looks_again(place):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        seen = await directory.owner("s")
        changed = directory.cluster.changed
        waited_s = []

        async def late(key, revision, timeout_s):
            # It changes while nobody listens, and what is listened for then is gone.
            if not waited_s:
                new = await directory.transfer("s", token, "b", nonce(2))
                await directory.put("s", new, b"later")
                await compact(directory, (await directory.state()).revision)
            begun_s = time.monotonic()
            await changed(key, revision, timeout_s)
            waited_s.append(time.monotonic() - begun_s)

        directory.cluster.changed = late
        found = await directory.watch("s", seen, 10.0)
        assert found.node == "b" and len(waited_s) == 1
        # Told by the compaction itself, long before it would have looked by itself.
        assert waited_s[0] < directory_etcd.LOOK_AGAIN_S / 2

    place.run(work)


def test_a_watch_sees_a_change_without_being_told(place, monkeypatch):
    """A member that fell silent, and an adoption, which changes no key of the session."""
    monkeypatch.setattr(directory_etcd, "LOOK_AGAIN_S", 0.2)

    async def work(directory):
        await directory.claim("s", "a", nonce(1))
        seen = await directory.owner("s")
        watching = asyncio.create_task(directory.watch("s", seen, 40.0))
        await asyncio.sleep(0.1)
        await directory.adopt()
        found = await asyncio.wait_for(watching, 20.0)
        assert found.token.generation == 2 and found.node == "a"

    place.run(work)


# --- Keys. ---


def test_a_directory_is_made_once_by_however_many_come_first(place):
    async def work():
        ways = [place.directory() for _ in range(8)]
        states = await asyncio.gather(*(way.state() for way in ways))
        assert len({state.directory_id for state in states}) == 1
        for way in ways:
            await way.close()

    asyncio.run(work())


OTHER_FORMAT = b'{"format":2,"id":"AAAAAAAAAAAAAAAAAAAAAA==","generation":1,"cluster":1}'


@pytest.mark.parametrize("content", [b"hello", b"{}", OTHER_FORMAT])
def test_a_keyspace_of_something_else_is_refused_and_left_alone(place, content):
    async def work(directory):
        await directory.cluster.swap((), [put(directory.keys.directory, content)])
        for call in (directory.state(), directory.owner("s"), directory.claim("s", "a", nonce(1))):
            with pytest.raises(DirectoryError, match="/directory: "):
                await call
        found = await directory.cluster.look([get(directory.keys.directory)])
        assert key_values(found.responses)[0][0].value == content

    place.run(work)


def test_an_etcd_made_from_a_backup_is_refused_until_it_is_adopted(place):
    async def work(directory):
        old = await directory.claim("s", "a", nonce(1))
        answer = await directory.cluster.look([get(directory.keys.directory)])
        identity, _ = read_identity(directory.keys, key_values(answer.responses)[0])
        other = Identity(1, identity.id, 1, identity.cluster ^ 1)
        await directory.cluster.swap((), [put(directory.keys.directory, encoded(other))])
        for call in (
            directory.owner("s"),
            directory.claim("t", "a", nonce(2)),
            directory.register("a", nonce(3), 10.0),
            directory.renew("a", nonce(3), 10.0),
        ):
            with pytest.raises(DirectoryWentBackError, match="adopt it"):
                await call
        assert (await directory.state()).directory_id == identity.id
        assert (await directory.adopt()).generation == 2
        entry = await directory.owner("s")
        assert isinstance(entry, Ownership) and entry.node == "a"
        with pytest.raises(StaleTokenError, match="generation 1"):
            await directory.transfer("s", old, "b", nonce(4))

    place.run(work)


def test_an_adoption_between_the_look_and_the_write_stops_the_write(place):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        swap, adopt = directory.cluster.swap, place.directory().adopt

        async def later(*arguments):
            directory.cluster.swap = swap
            await adopt()
            return await swap(*arguments)

        directory.cluster.swap = later
        with pytest.raises(StaleTokenError, match="generation 1"):
            await directory.transfer("s", token, "b", nonce(2))
        assert (await directory.owner("s")).node == "a"
        # A claim starts from no token: it is made in the generation of now.
        directory.cluster.swap = later
        assert (await directory.claim("t", "a", nonce(3))).generation == 3

    place.run(work)


def test_tombstones_are_removed_a_few_at_a_time_and_never_too_early(place, monkeypatch):
    monkeypatch.setattr(directory_etcd, "TOMBSTONE_SPAN", 20)
    monkeypatch.setattr(directory_etcd, "SWEEP", 4)

    async def work(directory):
        tokens = []
        for number in range(60):
            tokens.append(await directory.claim(f"s{number}", "a", nonce(number)))
            await directory.release(f"s{number}", tokens[-1])
        revision = (await directory.state()).revision
        records = [await directory.owner(f"s{number}") for number in range(60)]
        for record, token in zip(records, tokens, strict=True):
            assert record is not None or token.revision <= revision - 20
        assert sum(record is not None for record in records) < 30

    place.run(work)


def test_a_release_that_was_done_does_not_fail_because_nothing_could_be_swept(place):
    async def work(directory):
        token = await directory.claim("s", "a", nonce(1))
        look, swap = directory.cluster.look, directory.cluster.swap

        async def away(*_):
            raise DirectoryError("away")

        async def last(*arguments):
            answer = await swap(*arguments)
            directory.cluster.look = away
            return answer

        directory.cluster.swap = last
        await directory.release("s", token)
        directory.cluster.look = look
        assert (await directory.owner("s")).token == token

    place.run(work)


def test_names_that_would_be_another_key_are_kept_apart(place):
    async def work(directory):
        for number, name in enumerate(("a", "a/s", "a%2Fs", "ä")):
            await directory.claim(f"s{number}", name, nonce(number))
            await directory.register(name, nonce(number), 10.0)
        for number, name in enumerate(("a", "a/s", "a%2Fs", "ä")):
            assert [one.session_id for one in await directory.owned_by(name)] == [f"s{number}"]
            assert (await directory.lease(name)).incarnation == nonce(number)
        await directory.adopt()

    place.run(work)


# --- A node that stands still. ---


_FROZEN = """
import asyncio, sys
from node.config import prepare_process
prepare_process()
from node.clock import BootClock
from node.directory import open_directory
from node.errors import FencedError, StaleTokenError
from node.lease import NodeLease

async def main():
    directory = open_directory(sys.argv[1])
    lease = NodeLease(directory, "frozen", BootClock(), 1.0)
    await lease.start()
    token = await directory.claim("s", "frozen", bytes(16))
    mark = lease.require()
    print("owns", flush=True)
    sys.stdin.readline()
    try:
        lease.require(mark)
    except FencedError:
        print("fenced", flush=True)
    await lease.renew()
    try:
        await directory.put("s", token, b"late")
    except StaleTokenError:
        print("stale", flush=True)
    await directory.close()

asyncio.run(main())
"""


def test_a_frozen_owner_is_taken_over_from_and_what_it_writes_when_it_thaws_is_refused(place):
    async def work(directory):
        url = place.etcds.url(prefix=place.prefix)
        child = await asyncio.create_subprocess_exec(
            *(os.sys.executable, "-c", _FROZEN, url),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert await child.stdout.readline() == b"owns\n"
            child.send_signal(signal.SIGSTOP)
            entry = await directory.owner("s")
            await place.outlast(directory, "frozen")
            taken = await directory.takeover("s", entry.token, "b", nonce(1))
            child.send_signal(signal.SIGCONT)
            said, _ = await asyncio.wait_for(child.communicate(b"go on\n"), 20)
            assert said == b"fenced\nstale\n"
            assert (await directory.owner("s")).token == taken
            assert await directory.published("s") is None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    place.run(work)


def test_no_etcd_client_is_a_plain_word(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name == "node.directory_etcd":
            raise ModuleNotFoundError("No module named 'etcd3aio'", name="etcd3aio")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"kvpack\[etcd\]"):
        open_directory("etcd://127.0.0.1?tls=off")


def test_every_key_of_a_directory_lies_below_its_prefix(place):
    async def work(directory: EtcdDirectory):
        await directory.register("a", nonce(1), 10.0)
        token = await directory.claim("s", "a", nonce(1))
        await directory.put("s", token, b"v")
        await directory.release("t", await directory.claim("t", "a", nonce(2)))
        reads = [get(directory.keys.all, end_of(directory.keys.all), keys_only=True)]
        answer = await directory.cluster.look(reads)
        found = sorted(
            one.key.decode().removeprefix(directory.keys.all)
            for one in key_values(answer.responses)[0]
        )
        assert found == [
            "directory", "lease/a", "node/a", "owned/a/s", "released/t", "session/s", "value/s"
        ]  # fmt: skip

    place.run(work)
