"""Three members over mutual TLS, of which the leading one is killed again and again; a restore."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess

import pytest
from click.testing import CliRunner
from directory_support import nonce
from etcd_support import EtcdPlace, Etcds, require_etcd

from node.cli import main
from node.directory import settle
from node.directory_etcd_keys import key_values
from node.directory_seen import Seen, SeenDirectory
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    DirectoryWentBackError,
    StaleTokenError,
)
from node.etcd import get

pytestmark = pytest.mark.slow

TRANSFERS = 400
CONTENDERS = 4


@pytest.fixture
def three(tmp_path, parties):
    require_etcd()
    with Etcds(tmp_path, 3, parties / "authority") as running:
        yield running


async def taken_by(place, who, won, counts, stop):
    """Take "s" over from every token that is seen, until that was done often enough."""
    name = "abc"[who % 3]
    directory = place.directory(name)
    try:
        while not stop.is_set():
            try:
                entry = await directory.owner("s")
                number = int.from_bytes(entry.nonce[:15], "big")
                if number >= TRANSFERS:
                    stop.set()
                    return
                # Whose it is, is part of it: else two would find the same one and both believe it.
                mine = (number + 1).to_bytes(15, "big") + bytes([who])
                token = await moved(directory, entry.token, name, mine, counts)
            except StaleTokenError:
                continue
            except DirectoryAmbiguousError:
                counts["open"] += 1
                continue
            except DirectoryError:
                await asyncio.sleep(0.05)
                continue
            won.append((token.revision, number + 1, who))
    finally:
        await directory.close()


async def moved(directory, token, name, mine, counts):
    try:
        return await directory.transfer("s", token, name, mine)
    except DirectoryAmbiguousError:
        counts["ambiguous"] += 1
        async with asyncio.timeout(30):
            while True:
                try:
                    return await settle(directory, "s", token, name, mine)
                except DirectoryAmbiguousError:
                    await asyncio.sleep(0.1)


async def watched(place, seen_revisions, stop):
    """Every owner that a watch tells, in order."""
    directory, seen = place.directory("a"), None
    try:
        while not stop.is_set():
            try:
                found = await directory.watch("s", seen, 2.0)
            except DirectoryError:
                await asyncio.sleep(0.05)
                continue
            if found != seen:
                seen_revisions.append(found.token.revision)
            seen = found
    finally:
        await directory.close()


def test_400_contended_transfers_land_once_each_while_the_leader_is_killed_twice(three, parties):
    place = EtcdPlace(three, parties, "tests/three")
    won, told, counts, stop = [], [], {"ambiguous": 0, "open": 0}, asyncio.Event()

    async def killing():
        for share in (1, 2):
            async with asyncio.timeout(60):
                while len(won) < TRANSFERS * share // 3:
                    await asyncio.sleep(0.02)
            leader = await asyncio.to_thread(three.leader)
            leader.kill()
            await asyncio.sleep(2.0)
            leader.start(three.members)
            await asyncio.to_thread(three.wait)

    async def work(directory):
        await directory.claim("s", "nobody", nonce(0))
        watching = asyncio.create_task(watched(place, told, stop))
        async with asyncio.timeout(150):
            taking = (taken_by(place, who, won, counts, stop) for who in range(CONTENDERS))
            await asyncio.gather(killing(), *taking)
            await watching
        answer = await directory.cluster.look([get(directory.keys.session("s"))])
        (entry,) = key_values(answer.responses)[0]
        return entry.version, entry.mod_revision

    versions, last = place.run(work, 200)
    won.sort()
    # Exactly once: every write of the key is one that somebody was told he had made.
    assert versions == TRANSFERS + 1
    assert [number for _, number, _ in won] == list(range(1, TRANSFERS + 1))
    assert len({revision for revision, _, _ in won}) == TRANSFERS and won[-1][0] == last
    assert told == sorted(set(told)) and told[-1] == last
    print(f"ambiguous {counts['ambiguous']}, told {len(told)}")


def test_a_node_keeps_its_lease_and_check_names_a_dead_member(three, parties):
    place = EtcdPlace(three, parties, "tests/three")
    url = "etcd://" + ",".join(f"127.0.0.1:{one.client}" for one in three.members)
    arguments = ["directory", "check", url, "--credentials", str(parties / "a"), "--json"]

    def checked():
        done = CliRunner().invoke(main, arguments)
        found = json.loads(done.stdout)
        return done.exit_code, {one["check"]: one for one in found["checks"]}

    code, found = checked()
    assert code == 0 and found["members"]["numbers"] == {"members": 3}

    async def work(directory):
        await directory.register("a", nonce(1), 10.0)
        await directory.claim("s", "a", nonce(1))

    place.run(work)
    leader = three.leader()
    leader.kill()

    async def after(directory):
        # A leader that is new lets every lease run from its beginning.
        lease = await directory.lease("a")
        assert lease.incarnation == nonce(1) and lease.left_s > 5
        await directory.renew("a", nonce(1), 10.0)
        assert (await directory.owner("s")).node == "a"

    place.run(after)
    code, found = checked()
    assert code == 1 and not found["members"]["ok"]
    assert f":{leader.client}: " in found["members"]["said"]
    assert all(one["ok"] for name, one in found.items() if name != "members"), found
    three.members[(three.members.index(leader) + 1) % 3].kill()

    async def no_quorum(directory):
        with pytest.raises(DirectoryError):
            await directory.owner("s")

    place.run(no_quorum)


def test_an_etcd_restored_from_a_snapshot_is_refused_until_it_is_adopted(tmp_path, parties):
    require_etcd()
    etcdctl = shutil.which("etcdctl")
    if etcdctl is None:
        pytest.skip("no etcdctl on this machine: apt-get install etcd-client")
    (tmp_path / "one").mkdir()
    with Etcds(tmp_path / "one", 1, parties / "authority") as first:
        place = EtcdPlace(first, parties, "tests/restored")
        seen = Seen(tmp_path / "seen.sqlite")

        async def fill(directory):
            watching = SeenDirectory(directory, seen)
            await watching.register("a", nonce(1), 10.0)
            return await watching.claim("s", "a", nonce(1))

        token = place.run(fill)
        names = {"cacert": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
        tls = [f"--{option}={first.tls / name}" for option, name in names.items()]
        where = f"--endpoints=https://127.0.0.1:{first.members[0].client}"
        environment = {"ETCDCTL_API": "3"}
        backup = tmp_path / "backup"
        save = [etcdctl, where, *tls, "snapshot", "save", backup]
        subprocess.run(save, check=True, env=environment, capture_output=True)

        async def more(directory):
            return await SeenDirectory(directory, seen).transfer("s", token, "b", nonce(2))

        lost = place.run(more)
    (tmp_path / "two").mkdir()
    second = Etcds(tmp_path / "two", 1, parties / "authority")
    member = second.members[0]
    subprocess.run(
        [
            etcdctl, "snapshot", "restore", backup, "--name", member.name,
            "--data-dir", second.root / member.name, "--initial-cluster-token", second.root.name,
            "--initial-cluster", f"{member.name}=https://127.0.0.1:{member.peer}",
            "--initial-advertise-peer-urls", f"https://127.0.0.1:{member.peer}",
        ],
        check=True, env=environment, capture_output=True,
    )  # fmt: skip
    with second:
        place = EtcdPlace(second, parties, "tests/restored")

        async def refused(directory):
            for call in (directory.owner("s"), SeenDirectory(directory, seen).state()):
                with pytest.raises(DirectoryWentBackError, match="adopt"):
                    await call

        place.run(refused)
        url = f"etcd://127.0.0.1:{member.client}?prefix=tests/restored"
        credentials = ("--credentials", str(parties / "a"))
        adopt = ["directory", "adopt", "--directory", url, *credentials, "--json"]
        done = CliRunner().invoke(main, adopt)
        assert json.loads(done.stdout)["generation"] == 2, done.stderr

        async def after(directory):
            entry = await SeenDirectory(directory, seen).owner("s")
            assert entry.node == "a" and entry.token.newer_than(lost)
            for old in (token, lost):
                with pytest.raises(StaleTokenError):
                    await directory.transfer("s", old, "c", nonce(9))

        place.run(after)


def test_an_etcd_that_lets_anybody_in_fails_the_check(tmp_path, parties):
    require_etcd()
    open_to_all = Etcds(tmp_path, 1, parties / "authority")
    open_to_all.demands_certificates = False
    with open_to_all:
        url = f"etcd://127.0.0.1:{open_to_all.members[0].client}"
        done = CliRunner().invoke(
            main, ["directory", "check", url, "--credentials", str(parties / "a"), "--json"]
        )
    found = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert done.exit_code == 1 and "was let in" in found["stranger"]["said"]
    assert found["wrong CA"]["ok"]
