"""Sessions in stores: there and back, copied, raced for, refused, and failing at every step."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from unittest import mock

import pytest
from click.testing import CliRunner
from node_support import run
from parked_support import (
    PROMPT,
    StoreWorld,
    agree,
    bits,
    order,
    owner,
    talking,
    twin_bits,
    with_other_numerics,
)

from kvpack.chunk import seal
from kvpack.errors import PublishError
from kvpack.store import Budget, CutWriter, GcPolicy, apply_gc, list_cuts, open_store, plan_gc
from node.cli import main
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    PeerAnswerError,
    StaleTokenError,
    UsageError,
)
from node.migration.park import ParkOrder
from node.migration.receiver import Receiver
from node.migration.restore import RestoreOrder
from node.migration.shelf import Shelf
from node.parked import Parked
from node.pb.v1 import session_pb2 as pb
from node.stores import StoreRoots
from tests.small_model import make_small_model


@pytest.fixture
def stores(tmp_path, model_dir):
    world = StoreWorld.make(tmp_path, model_dir)
    (tmp_path / "stores").mkdir()
    return world


def kept_after_collecting(path) -> list[bytes]:
    """Ids of the cuts that a collector leaves which may keep nothing that it may take."""
    store = open_store(path)
    policy = GcPolicy(Budget(0, 0), grace_s=0)
    apply_gc(store, plan_gc(store, 1 << 33, policy), 1 << 33, b"c" * 16, lambda: None)
    found = [cut.cut_id for cut in list_cuts(store)]
    store.close()
    return found


def test_a_session_goes_into_a_store_and_comes_back_on_another_node_by_command(stores):
    common = ("--credentials", str(stores.credentials("client")))

    async def call(*arguments):
        words = [*map(str, arguments), *common]
        return await asyncio.to_thread(CliRunner().invoke, main, words)

    async def work():
        async with stores.node("source") as (source, giving):
            expected = await twin_bits(giving)
            await talking(giving)
            here, store = f"source@{source.address}", f"store:{stores.store}"
            async with stores.node("target") as (target, taking):
                there = f"target@{target.address}"
                parked = json.loads(
                    (await call("migrate", "s", "--to", store, "--node", here, "--json")).stdout
                )
                assert await owner(source) == f"store.{parked['store_id']}"
                assert "s" not in source.sessions
                for client in (giving, taking):
                    with pytest.raises(PeerAnswerError, match="kvnode session restore"):
                        await client.get("s")
                    with pytest.raises(PeerAnswerError, match="owned by node store"):
                        await client.open("s")
                # However short room is, what lies there and nowhere else is not taken.
                kept = await asyncio.to_thread(kept_after_collecting, stores.store)
                assert kept == [bytes.fromhex(parked["cut_id"])]
                shown = await call("session", "restore", "s", "--node", there, "--from", store)
                assert "s on target" in shown.stdout and "continuation exact" in shown.stdout
                assert await owner(target) == "target"
                found = await bits(taking)
                # Nothing keeps it there any more.
                assert await asyncio.to_thread(kept_after_collecting, stores.store) == []
            async with stores.node("target") as (_, taking):
                # It was made durable here before it became this node's.
                return found, await bits(taking), expected

    found, again, expected = run(work())
    assert agree(found, expected) and agree(again, expected)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("migrate", "s", "--to", "store:team"), "absolute"),
        (("migrate", "s", "--to", "store:/a", "--to", "store:/b"), "one at a time"),
        (("migrate", "s", "--to", "store:/a", "--mode", "copy", "--as", "c"), "has no name"),
        (("session", "restore", "s", "--from", "/a"), "store:PATH"),
        (("session", "restore", "../s", "--from", "store:/a"), "session_id"),
    ],
)
def test_bad_orders_get_one_line_and_the_exit_code_of_usage(arguments, word):
    words = [*arguments, "--node", "a@127.0.0.1:1", "--credentials", "nowhere"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert word in result.stderr and result.stderr.count("\n") == 1


def test_a_copy_goes_on_at_its_source_and_comes_out_under_any_free_name(stores, tmp_path):
    async def work():
        async with stores.pair() as (source, giving, target, taking):
            expected = await twin_bits(giving)
            session = await talking(giving)
            with pytest.raises(PeerAnswerError, match="--store-root"):
                await giving.park(session, str(tmp_path / "elsewhere"), copy=True)
            assert not (tmp_path / "elsewhere").exists()
            reply = await giving.park(session, stores.store, copy=True)
            assert not reply.HasField("token") and await owner(source) == "source"
            # Only the owner's own move makes a store its owner.
            with pytest.raises(PeerAnswerError, match="owned by node source"):
                await taking.restore(order(stores))
            for name in ("c1", "c2"):
                await taking.restore(order(stores, restore_as=name))
                assert agree(await bits(taking, name), expected)
            with pytest.raises(PeerAnswerError) as taken:
                await taking.restore(order(stores, restore_as="s"))
            assert taken.value.peer_reason == "session_exists"
            assert await owner(target, "c1") == "target"
            with_other_numerics(target)
            with pytest.raises(PeerAnswerError, match="needs consent"):
                await taking.restore(order(stores, restore_as="c3"))
            options = {"restore_as": "c3", "accept_compatible": True}
            restored = await taking.restore(order(stores, **options))
            # Its logits lie with the cut, so drift is measured there, too.
            assert (restored.continuation_verdict, restored.drift) == ("compatible", 0.0)
            return await bits(giving), expected

    assert agree(*run(work()))


def test_only_stores_below_a_named_folder_are_opened(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    roots = StoreRoots((root,))
    for text in (
        "", "team", "./team", f"{root}", f"{root}/", f"{root}/../outside/x", f"{outside}/x",
        f"{root}/link", f"{root}/link/x", f"{root}x/y", f"{root}/a\0b", f"{root}/\x1b[2J",
        f"{root}/" + "x" * 1024,
    ):  # fmt: skip
        with pytest.raises(UsageError, match="store"):
            roots.find(text)
    assert roots.find(f"{root}/a/../team") == root.resolve() / "team"
    with pytest.raises(UsageError, match="not below"):
        StoreRoots().find(f"{root}/team")
    with pytest.raises(UsageError, match="no such folder"):
        StoreRoots((tmp_path / "nowhere",))
    assert list(outside.iterdir()) == []


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


FAILURES = {
    "open": (Shelf, "__init__"),
    "reserve": (CutWriter, "reserve"),
    "write": (CutWriter, "add"),
    "publish": (CutWriter, "publish_sealed"),
}

LOST = DirectoryAmbiguousError("the reply is lost")
AWAY = DirectoryError("away for one write")


class Flaky:
    """A directory whose next write of one kind fails, before or after it was done."""

    def __init__(self, directory, method, done, error):
        self._directory, self._method, self._done, self._error = directory, method, done, error
        self.arguments = None
        self.reads_away = 0

    async def owner(self, session_id):
        if self.arguments is not None and self.reads_away:
            self.reads_away -= 1
            raise AWAY
        return await self._directory.owner(session_id)

    def __getattr__(self, name):
        real = getattr(self._directory, name)
        if name != self._method or self.arguments is not None:
            return real

        async def fail(*arguments):
            self.arguments = arguments
            if self._done:
                await real(*arguments)
            raise self._error

        return fail


def test_whatever_fails_leaves_the_session_in_one_place_with_its_bits(stores, monkeypatch):
    async def fails(node, client, name, word):
        session = await client.get(name)
        with pytest.raises(PeerAnswerError, match=rf"{word}.*stays on this node"):
            await client.park(session, stores.store, copy=False)
        assert await owner(node, name) == "source"

    async def work():
        async with stores.pair() as (source, giving, _, taking):
            expected, directory = await twin_bits(giving), source.sessions.directory
            for name, (kind, method) in FAILURES.items():
                await talking(giving, name)
                with monkeypatch.context() as patch:
                    patch.setattr(kind, method, failing(PublishError("no room")))
                    await fails(source, giving, name, "no room")
                assert agree(await bits(giving, name), expected)
            for number, what in enumerate(
                [("put", False, AWAY), ("put", True, LOST), ("transfer", False, AWAY)]
            ):
                name = f"stays-{number}"
                await talking(giving, name)
                flaky = source.sessions.directory = Flaky(directory, *what)
                await fails(source, giving, name, str(what[2]))
                # What was put before is of an older token: nobody takes it for the session.
                with pytest.raises(PeerAnswerError, match="owned by node source"):
                    await taking.restore(order(stores, name))
                if what[0] == "transfer":
                    # It arrives after all: the session has a higher revision by now.
                    assert flaky.arguments[2].startswith("store.")
                    with pytest.raises(StaleTokenError):
                        await directory.transfer(*flaky.arguments)
                assert agree(await bits(giving, name), expected)
            assert await asyncio.to_thread(kept_after_collecting, stores.store) == []
            for number, (done, reads_away) in enumerate([(False, 0), (True, 0), (True, 1)]):
                name = f"goes-{number}"
                session = await talking(giving, name)
                flaky = source.sessions.directory = Flaky(directory, "transfer", done, LOST)
                flaky.reads_away = reads_away
                await giving.park(session, stores.store, copy=False)
                await taking.restore(order(stores, name))
                assert agree(await bits(taking, name), expected)

    run(work())


class Killed(BaseException):
    """The process ends here: nothing handles it."""


#: Where it ends, and who owns the session then.
KILLS = {
    "before-a-chunk": (CutWriter, "add", "before", "source"),
    "before-the-cut": (CutWriter, "publish_sealed", "before", "source"),
    "after-the-cut": (CutWriter, "publish_sealed", "after", "source"),
    "before-the-value": ("directory", "put", "before", "source"),
    "after-the-value": ("directory", "put", "after", "source"),
    "after-the-swap": ("directory", "transfer", "after", "store"),
    "before-the-release": ("sessions", "drop", "before", "store"),
    "after-the-release": ("sessions", "drop", "after", "store"),
}


def dying(real, when):
    """``real``, whose process ends before or after it."""
    if asyncio.iscoroutinefunction(real):

        async def die(*arguments, **options):
            if when == "after":
                await real(*arguments, **options)
            raise Killed

        return die

    def die_now(*arguments, **options):
        if when == "after":
            real(*arguments, **options)
        raise Killed

    return die_now


def test_a_process_that_dies_at_any_step_leaves_the_session_at_its_source_or_in_the_store(
    stores, monkeypatch
):
    async def work():
        async with stores.node("target") as (_, first):
            expected = await twin_bits(first)
            for name in KILLS:
                await first.park(await talking(first, name), stores.store, copy=False)
        async with stores.node("source") as (source, giving):
            places = {"directory": source.sessions.directory, "sessions": source.sessions}
            for name, (place, method, when, _) in KILLS.items():
                # They came from elsewhere, so each has a durable pack here, and goes on from it.
                await giving.restore(order(stores, name))
                await bits(giving, name, count=6)
                at = places.get(place, place)
                session = await source.sessions.find(name)
                with monkeypatch.context() as patch:
                    patch.setattr(at, method, dying(getattr(at, method), when))
                    with pytest.raises(Killed):
                        await source.depot.park(name, session.token, ParkOrder(stores.store))
        async with stores.node("source") as (source, giving):
            for name, (_, _, _, owned) in KILLS.items():
                assert (await owner(source, name)).partition(".")[0] == owned
                if owned == "source":
                    # Before the value nothing says that a newer cut lies there: the loss bound.
                    newer = name == "after-the-value"
                    known = (await giving.get(name)).next_index
                    assert known == PROMPT + (6 if newer else 3)
                else:
                    await giving.restore(order(stores, name))
                assert agree(await bits(giving, name), expected)
                assert await owner(source, name) == "source"

    run(work())


def test_a_cut_that_is_newer_than_a_pack_is_not_passed_over_while_its_store_is_away(
    stores, monkeypatch
):
    async def work():
        async with stores.node("source") as (source, giving):
            session = await talking(giving)
            with monkeypatch.context() as patch:
                directory = source.sessions.directory
                patch.setattr(directory, "put", dying(directory.put, "after"))
                with pytest.raises(Killed):
                    await source.depot.park(
                        "s", (await source.sessions.find("s")).token, ParkOrder(stores.store)
                    )
        (stores.root / "stores" / "team").rename(stores.root / "away")
        async with stores.node("source") as (_, giving):
            with pytest.raises(PeerAnswerError, match="not on this node"):
                await giving.get("s")
            with pytest.raises(PeerAnswerError, match="being handed over"):
                await giving.open("s")
        (stores.root / "away").rename(stores.root / "stores" / "team")
        async with stores.node("source") as (_, giving):
            assert (await giving.get("s")).next_index == session.next_index
            return await bits(giving), await twin_bits(giving)

    assert agree(*run(work()))


def chunk_files(stores):
    return sorted((stores.root / "stores" / "team" / "chunks").iterdir())


def test_of_two_nodes_that_restore_at_once_one_gets_it_and_what_fails_leaves_it_there(
    stores, monkeypatch, tmp_path
):
    make_small_model(tmp_path / "other", "muse_glimmer", seed=9, window=16, layers=4)
    honest = seal.compute_content_id

    async def interrupted(giving, there):
        """Every way in which a restore fails, each of which leaves the session where it lies."""
        async with stores.node("target") as (target, taking):

            async def refused(client, word):
                with pytest.raises(PeerAnswerError, match=word):
                    await client.restore(order(stores))
                assert await owner(target) == there and "s" not in target.sessions

            async with stores.node("third", tmp_path / "other") as (_, third):
                await refused(third, "weights")
            path = chunk_files(stores)[0]
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            await refused(taking, "chunk")
            path.rename(tmp_path / "gone")
            await refused(taking, "not in the store")
            path.write_bytes(whole)
            path.chmod(0o600)
            with monkeypatch.context() as patch:
                patch.setattr(Receiver, "publish", dying(Receiver.publish, "before"))
                with pytest.raises(Killed):
                    await target.depot.restore(RestoreOrder("s", stores.store))
            assert await owner(target) == there
            # A value that names another cut than the entry was written for.
            directory = target.sessions.directory
            entry, value = await directory.owner("s"), await directory.published("s")
            parked = dataclasses.replace(Parked.decode(value.value), cut_id=bytes(32))
            await directory.put("s", entry.token, parked.encode())
            await refused(taking, "at which cut")
            await directory.put("s", entry.token, value.value)

    async def race(source, giving, taking):
        """Both at once; the source learns that its write failed only when the other one has won."""
        # A store that neither has dealt with: both give their transfers the same count.
        fresh = pb.RestoreRequest(session_id="r", store=f"{stores.store}-2")
        await giving.park(await talking(giving, "r"), fresh.store, copy=False)
        won, real = asyncio.Event(), source.sessions.directory

        class Late(Flaky):
            def __getattr__(self, name):
                late = name == "transfer" and self.arguments is None
                return self.late if late else getattr(real, name)

            async def late(self, *arguments):
                self.arguments = arguments
                await won.wait()
                raise LOST

        source.sessions.directory = Late(real, "transfer", False, LOST)
        slow = asyncio.create_task(giving.restore(fresh))
        while source.sessions.directory.arguments is None and not slow.done():
            await asyncio.sleep(0.01)
        await taking.restore(fresh)
        won.set()
        with pytest.raises(PeerAnswerError, match="not the current one"):
            await slow
        assert await owner(source, "r") == "target" and "r" not in source.sessions
        source.sessions.directory = real

    async def work():
        async with stores.node("source") as (source, giving):
            expected = await twin_bits(giving)
            parked = await giving.park(await talking(giving), stores.store, copy=False)
            there = f"store.{parked.store_id.hex()}"
            await interrupted(giving, there)
            async with stores.node("target") as (_, taking):
                await taking.restore(order(stores))
                await race(source, giving, taking)
                assert agree(await bits(taking), expected)
                assert agree(await bits(taking, "r"), expected)
                # Rows under a content id that is not theirs, from who holds the tenant's key.
                session = await talking(giving, "lie")
                with mock.patch.object(seal, "compute_content_id", lie):
                    await giving.park(session, stores.store, copy=False)
                with pytest.raises(PeerAnswerError, match="content"):
                    await taking.restore(order(stores, "lie"))
                assert await owner(source, "lie") == there

    def lie(context, reference, plaintext):
        return honest(context, reference, bytes(len(plaintext)) if reference.layers else plaintext)

    run(work())
