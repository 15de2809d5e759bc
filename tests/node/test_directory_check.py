"""``kvnode directory check``: what holds is ok, and each thing that does not is FAILED by name."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from click.testing import CliRunner
from directory_support import Place
from etcd_support import EtcdPlace, free_ports

from node import directory_check, etcd_cluster
from node.cli import main
from node.directory_check import findings
from node.directory_etcd_keys import end_of, key_values
from node.directory_scratch import Scratch
from node.directory_sqlite import SqliteDirectory
from node.errors import StaleTokenError
from node.etcd import Etcd, get, put

COMMON_CHECKS = directory_check._COMMON
COMMON = ["speed", "contenders", "fencing", "lost replies", "watch", "lease"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(directory_check, "TTL_S", 0.5)
    # For what is right, which a busy machine may be late with.
    monkeypatch.setattr(directory_check, "LATE_S", 10.0)
    monkeypatch.setattr(directory_check, "TOLD_S", 10.0)
    for name in ("LOOK_S", "TRY_S", "WRITE_S"):
        monkeypatch.setattr(etcd_cluster, name, 25.0)


def check(*arguments):
    done = CliRunner().invoke(main, ["directory", "check", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def checked(*arguments):
    """Exit code, and findings by name."""
    done = check(*arguments, "--json")
    found = json.loads(done.stdout)
    assert found["ok"] == (done.exit_code == 0) == all(one["ok"] for one in found["checks"])
    return done.exit_code, {one["check"]: one for one in found["checks"]}


def test_a_file_is_checked_beside_itself_and_stays_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "directory.sqlite"
    code, found = checked(f"sqlite:{path}")
    assert code == 0 and list(found) == ["file", *COMMON]
    assert 0.5 <= found["lease"]["numbers"]["over_after_s"] < 10.5
    assert "not there yet" in found["file"]["said"] and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(directory_check, "_COMMON", COMMON_CHECKS[:2])

    async def work(directory):
        return await directory.claim("s", "a", bytes(16))

    Place(path).run(work)
    code, found = checked(f"sqlite:{path}")
    assert code == 0 and found["file"]["numbers"] == {"generation": 1, "revision": 1}
    assert found["contenders"]["numbers"] == {"contenders": 50, "winners": 1}
    assert Place(path).run(lambda directory: directory.owned_by("kvnode-check-a")) == []


def test_a_directory_of_another_node_is_checked_under_our_own_name(tmp_path, parties):
    place = Place(tmp_path / "directory.sqlite", parties)

    async def work():
        directory = SqliteDirectory(place.path)
        await directory.register("a", bytes(16), 60.0)
        async with place.served(directory) as address:
            url = f"grpc://keeper@{address}"
            given = await asyncio.to_thread(checked, url, "--credentials", parties / "a")
        lease, owned = await directory.lease("a"), await directory.owned_by("a")
        await directory.close()
        return given, lease, owned

    (code, found), lease, owned = asyncio.run(work())
    assert code == 0 and list(found) == ["directory", "stranger", *COMMON]
    # A node runs under our name: its lease is left alone, and so is what it owns.
    assert "not tried: node a runs" in found["lease"]["said"]
    assert lease.incarnation == bytes(16) and lease.left_s > 30 and owned == []


def test_an_etcd_is_checked_with_its_members_keys_and_certificates(
    etcds, parties, tmp_path, monkeypatch
):
    # It counts in whole seconds, and looks for what is over twice in one.
    monkeypatch.setattr(directory_check, "TTL_S", 1.0)
    place = EtcdPlace(etcds, parties, f"tests/{tmp_path.name}")
    url = f"etcd://127.0.0.1:{etcds.members[0].client}?prefix={place.prefix}"
    done = check(url, "--credentials", parties / "a")
    assert done.exit_code == 0, done.stdout
    names = [line.partition(": ok: ")[0] for line in done.stdout.splitlines()]
    assert names == ["members", "keyspace", "wrong CA", "stranger", *COMMON]

    async def left(directory):
        keys = directory.keys
        found = await directory.cluster.look([get(keys.all, end_of(keys.all), keys_only=True)])
        return key_values(found.responses)[0]

    assert place.run(left) == []


def test_a_dead_a_stale_and_a_foreign_member_is_named(etcds, parties, tmp_path, monkeypatch):
    (dead,) = free_ports(1)
    live = etcds.members[0].client
    credentials = ("--credentials", parties / "a")
    monkeypatch.setattr(directory_check, "_COMMON", COMMON_CHECKS[:2])
    for where in (f"127.0.0.1:{dead},127.0.0.1:{live}", f"127.0.0.1:{live},127.0.0.1:{dead}"):
        code, found = checked(f"etcd://{where}?prefix=tests/dead", *credentials)
        assert code == 1 and not found["members"]["ok"]
        assert f"127.0.0.1:{dead}: " in found["members"]["said"]
        assert f"127.0.0.1:{live}: " not in found["members"]["said"]
        assert all(found[name]["ok"] for name in ("keyspace", *COMMON[:2]))
    real = Etcd.status
    monkeypatch.setattr("node.directory_check_etcd.BEHIND_S", 0.2)
    monkeypatch.setattr(directory_check, "_COMMON", ())
    for field, wrong, word in (("revision", 1, "stale"), ("cluster_id", 7, "of another etcd")):

        async def status(member, timeout_s, field=field, wrong=wrong):
            found = await real(member, timeout_s)
            setattr(found.header, field, wrong)
            return found

        monkeypatch.setattr(Etcd, "status", status)
        _, found = checked(f"etcd://127.0.0.1:{live}?prefix=tests/dead", *credentials)
        assert word in found["members"]["said"] and not found["members"]["ok"]


@pytest.mark.parametrize("key", ["directory", "settings/x"])
def test_a_keyspace_of_something_else_is_named(etcds, parties, tmp_path, monkeypatch, key):
    monkeypatch.setattr(directory_check, "_COMMON", ())
    place = EtcdPlace(etcds, parties, f"tests/{tmp_path.name}")

    async def plant(directory):
        await directory.cluster.swap((), [put(f"{directory.keys.all}{key}", b"theirs")])

    place.run(plant)
    _, found = checked(
        f"etcd://127.0.0.1:{etcds.members[0].client}?prefix={place.prefix}",
        *("--credentials", parties / "a"),
    )
    assert not found["keyspace"]["ok"] and found["members"]["ok"]


def test_what_cannot_be_reached_or_written_fails_and_exits_with_one(tmp_path, monkeypatch):
    (dead,) = free_ports(1)
    monkeypatch.setattr(etcd_cluster, "LOOK_S", 0.6)
    monkeypatch.setattr(directory_check, "_COMMON", COMMON_CHECKS[:2])
    code, found = checked(f"etcd://127.0.0.1:{dead}?tls=off")
    assert code == 1 and not any(one["ok"] for one in found.values())
    for url, why in (("etcd://h", "needs this"), (f"sqlite:{tmp_path}/x/y", "no folder")):
        done = check(url)
        assert done.exit_code not in (0, 1) and why in done.stderr and not done.stdout


# --- A directory with one fault: the check of that name finds it. ---


class Faulty:
    """A file with one method replaced."""

    def __init__(self, directory, **methods):
        self._directory = directory
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self._directory, name)


def faults(real):
    async def transfer_to_all(session_id, token, node, nonce):
        while True:
            entry = await real.owner(session_id)
            with contextlib.suppress(StaleTokenError):
                return await real.transfer(session_id, entry.token, node, nonce)

    async def put_anything(session_id, token, value):
        entry = await real.owner(session_id)
        await real.put(session_id, entry.token, value)

    async def forget(session_id, token):
        await real.release(session_id, token)
        await real.claim(session_id, "kvnode-check-a", b"x" * 16)

    async def never(session_id, seen, timeout_s):
        await asyncio.sleep(1.5)
        return await real.owner(session_id)

    async def at_once(node, incarnation, ttl_s):
        await real.register(node, incarnation, ttl_s)
        await real.expire(node, incarnation)

    async def for_ever(node, incarnation, ttl_s):
        await real.register(node, incarnation, 60.0)

    return {
        "contenders": ("transfer", transfer_to_all),
        "fencing": ("put", put_anything),
        "lost replies": ("release", forget),
        "watch": ("watch", never),
        "lease": ("renew", at_once),
        "lease ": ("renew", for_ever),
    }


@pytest.mark.parametrize(
    "name", ["contenders", "fencing", "lost replies", "watch", "lease", "lease "]
)
def test_a_planted_fault_fails_the_check_of_its_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(directory_check, "LATE_S", 0.5)
    monkeypatch.setattr(directory_check, "TOLD_S", 1.0)
    only = [one for one in COMMON_CHECKS if one[0] in ("speed", name.strip())]
    monkeypatch.setattr(directory_check, "_COMMON", only)

    async def work():
        directory = SqliteDirectory(tmp_path / "directory.sqlite")
        method, wrong = faults(directory)[name]
        scratch = Scratch(
            Faulty(directory, **{method: wrong}), "kvnode-check-a", "kvnode-check-b", True, []
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(directory.close)
            return {one.check: one async for one in findings(scratch)}

    found = asyncio.run(work())
    assert not found[name.strip()].ok, found
    assert found["speed"].ok
