"""The directory of another node: who may use it, as whom, and what a lost reply means."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import grpc
import pytest
from directory_support import KEEPER, NODES, Place, nonce
from node_support import SECONDS, events, move, prompt, refusal, run

from node import directory_remote, errors
from node.client import NodeClient
from node.directory import Released, open_directory, settle, transfer_settled
from node.directory_service import SERVICE
from node.directory_sqlite import SqliteDirectory
from node.errors import (
    CredentialsError,
    DirectoryAmbiguousError,
    DirectoryError,
    NodeBusyError,
    StaleTokenError,
    UsageError,
)
from node.migration.wire import token_message
from node.parked import store_owner
from node.pb.v1 import directory_pb2 as pb
from node.server import running
from node.trust import LiveCredentials, Role, open_channel


@pytest.fixture
def place(tmp_path, parties):
    return Place(tmp_path / "directory.sqlite", parties)


@contextlib.asynccontextmanager
async def kept(place, wrap=lambda directory: directory, shared=True):
    """The file, served through ``wrap``, and a way to it for each node."""
    directory = SqliteDirectory(place.path, place.clock)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(directory.close)
        address = await stack.enter_async_context(place.served(wrap(directory), shared))
        ways = {name: place.remote(name, address) for name in NODES}
        for way in ways.values():
            stack.push_async_callback(way.close)
        yield directory, ways, address


class Wrapped:
    """A directory with one method replaced."""

    def __init__(self, directory, **methods):
        self._directory = directory
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self._directory, name)


def test_only_nodes_that_are_pinned_there_reach_it_and_learn_nothing_else(place, caplog):
    async def work():
        async with kept(place) as (directory, _, address):
            for name in ("client", "stranger"):
                way = place.remote(name, address)
                with pytest.raises(DirectoryError, match="permission_denied"):
                    await way.owner("s")
                with pytest.raises(DirectoryError, match="permission_denied") as refused:
                    await way.claim("s", name, nonce(1))
                # gRPC's own refusal: nothing was written, and that is known.
                assert not isinstance(refused.value, DirectoryAmbiguousError)
                await way.close()
            assert (await directory.state()).revision == 0

    run(work())
    assert "not pinned for it" in caplog.text


def test_a_node_that_does_not_share_says_so(place):
    async def work():
        async with kept(place, shared=False) as (_, ways, _):
            with pytest.raises(DirectoryError, match="unimplemented"):
                await ways["a"].owner("s")
            with pytest.raises(DirectoryError, match="unimplemented") as refused:
                await ways["a"].claim("s", "a", nonce(1))
            assert not isinstance(refused.value, DirectoryAmbiguousError)

    run(work())


def test_a_node_writes_for_itself_alone(place):
    async def work():
        async with kept(place) as (directory, ways, _):
            a, b = ways["a"], ways["b"]
            token = await a.claim("s", "a", nonce(1))
            for write in (
                b.claim("t", "a", nonce(2)),
                b.transfer("s", token, "c", nonce(2)),
                b.takeover("s", token, "c", nonce(2)),
                b.register("a", nonce(3), 5.0),
                b.renew("a", nonce(3), 5.0),
                b.expire("a", nonce(3)),
            ):
                with pytest.raises(UsageError, match="node b cannot write for node"):
                    await write
            for write in (
                b.release("s", token),
                b.put("s", token, b"x"),
                b.transfer("s", token, store_owner(bytes(16)), nonce(2)),
            ):
                with pytest.raises(StaleTokenError, match="node b does not own it"):
                    await write
            assert (await directory.owner("s")).token == token
            # The name is the certificate's: no message carries one.
            taken = await b.transfer("s", token, "b", nonce(4))
            assert (await a.owner("s")).node == "b"
            with pytest.raises(StaleTokenError):
                await a.put("s", token, b"x")
            await b.put("s", taken, b"x")
            await b.release("s", taken)
            assert isinstance(await a.owner("s"), Released)

    run(work())


def test_a_reply_that_comes_too_late_is_ambiguous_and_settled(place, monkeypatch):
    def short():
        monkeypatch.setattr(directory_remote, "WRITE_S", 1.0)

    late = {"transfer": 1, "claim": 1, "release": 1}

    def wrap(directory):
        def slow(name):
            async def write(*args):
                result = await getattr(directory, name)(*args)
                if late[name]:
                    late[name] -= 1
                    # Whatever is asked after this one has time.
                    monkeypatch.setattr(directory_remote, "WRITE_S", SECONDS)
                    await asyncio.sleep(SECONDS)
                return result

            return write

        return Wrapped(directory, **{name: slow(name) for name in late})

    async def work():
        async with kept(place, wrap) as (directory, ways, _):
            short()
            with pytest.raises(DirectoryAmbiguousError, match="deadline"):
                await ways["a"].claim("s", "a", nonce(1))
            token = await ways["a"].claim("s", "a", nonce(1))
            assert token.revision == 1
            short()
            taken = await transfer_settled(ways["b"], "s", token, "b", nonce(2))
            assert taken.revision == 2
            short()
            with pytest.raises(DirectoryAmbiguousError):
                await ways["b"].release("s", taken)
            await ways["b"].release("s", taken)
            assert (await directory.state()).revision == 3

    run(work())


def test_a_first_write_that_arrives_while_it_is_settled_is_the_same_write(place):
    """The second transfer would lose against the first one, and be told that it had lost."""

    async def work():
        directory = SqliteDirectory(place.path, place.clock)
        token = await directory.claim("s", "a", nonce(1))

        async def owner(session_id):
            before = await directory.owner(session_id)
            # Between the look and the second write the first one arrives.
            await directory.transfer("s", token, "b", nonce(2))
            return before

        taken = await settle(Wrapped(directory, owner=owner), "s", token, "b", nonce(2))
        assert (await directory.owner("s")).token == taken
        await directory.close()

    run(work())


def test_a_keeper_that_dies_leaves_writes_open_and_reads_refused_within_a_bound(place):
    async def work():
        async with contextlib.AsyncExitStack() as stack:
            directory = SqliteDirectory(place.path, place.clock)
            served = contextlib.AsyncExitStack()
            address = await served.enter_async_context(place.served(directory))
            way = place.remote("a", address)
            stack.push_async_callback(way.close)
            token = await way.claim("s", "a", nonce(1))
            await served.aclose()
            start_s = time.monotonic()
            with pytest.raises(DirectoryAmbiguousError):
                await way.transfer("s", token, "a", nonce(2))
            with pytest.raises(DirectoryError) as refused:
                await way.owner("s")
            assert not isinstance(refused.value, DirectoryAmbiguousError)
            assert time.monotonic() - start_s < 15.0
            await directory.close()

    run(work())


def test_a_keeper_that_is_back_is_found_again(place):
    async def work():
        directory = SqliteDirectory(place.path, place.clock)
        async with place.served(directory) as address:
            way = place.remote("a", address)
            token = await way.claim("s", "a", nonce(1))
        with pytest.raises(DirectoryError):
            await way.owner("s")
        async with place.served(directory, port=address.port):
            async with asyncio.timeout(20.0):
                while True:
                    with contextlib.suppress(DirectoryError):
                        assert (await way.owner("s")).token == token
                        break
                    await asyncio.sleep(0.1)
            await way.close()
        await directory.close()

    run(work())


_REFUSALS = (
    errors.SessionExistsError,
    errors.StaleTokenError,
    errors.LeaseLiveError,
    errors.LeaseLostError,
    errors.DirectoryError,
    errors.DirectoryAmbiguousError,
    errors.DirectoryWentBackError,
)


def test_every_refusal_of_a_directory_is_the_same_error_on_the_other_side(place):
    async def work():
        raised = []

        async def refuse(*_):
            raise raised[-1]("as it was")

        def wrap(directory):
            return Wrapped(directory, claim=refuse, owner=refuse)

        async with kept(place, wrap) as (_, ways, _):
            for kind in _REFUSALS:
                raised.append(kind)
                with pytest.raises(kind, match="as it was") as write:
                    await ways["a"].claim("s", "a", nonce(1))
                with pytest.raises(kind, match="as it was") as look:
                    await ways["a"].owner("s")
                assert type(write.value) is type(look.value) is kind
            # A word that this side does not know says nothing about what was done.
            raised.append(errors.ProbeError)
            with pytest.raises(DirectoryAmbiguousError):
                await ways["a"].claim("s", "a", nonce(1))
            raised.append(ValueError)  # the keeper's own defect: no word at all
            with pytest.raises(DirectoryAmbiguousError):
                await ways["a"].claim("s", "a", nonce(1))

    run(work())


def test_those_who_watch_are_bounded(place, monkeypatch):
    monkeypatch.setattr("node.directory_service.WATCHERS_MAX", 2)

    async def work():
        async with kept(place) as (_, ways, _):
            watching = [asyncio.create_task(ways["a"].watch("s", None, 20.0)) for _ in range(2)]
            await asyncio.sleep(0.3)
            with pytest.raises(NodeBusyError):
                await ways["b"].watch("s", None, 20.0)
            await ways["b"].claim("s", "b", nonce(1))
            assert [entry.node for entry in await asyncio.gather(*watching)] == ["b", "b"]
            # Those who hang up count no longer.
            seen = await ways["a"].owner("s")
            for _ in range(3):
                hanging = asyncio.create_task(ways["a"].watch("s", seen, 20.0))
                await asyncio.sleep(0.1)
                hanging.cancel()
                await asyncio.wait({hanging})
            await asyncio.sleep(0.2)
            assert await ways["a"].watch("s", seen, 0.1) == seen

    run(work())


def test_bad_messages_get_a_named_refusal_and_change_nothing(place):
    async def work():
        async with kept(place) as (directory, ways, address):
            token = await ways["a"].claim("s", "a", nonce(1))
            credentials = LiveCredentials(place.parties / "a").current()
            channel = open_channel(credentials, credentials.peer(KEEPER, Role.NODE), address)

            def call(method, request):
                stub = channel.unary_unary(
                    f"/{SERVICE}/{method}",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=bytes,
                )
                return stub(request, timeout=5.0)

            good = {"session_id": "s", "token": token_message(token), "nonce": nonce(2)}
            for method, request in (
                ("Owner", pb.OwnerRequest(session_id="../s")),
                ("Watch", pb.WatchRequest(session_id="s", timeout_ms=60_001)),
                ("Watch", pb.WatchRequest(session_id="s", seen=pb.Record(owned=pb.Owned()))),
                ("Claim", pb.ClaimRequest(session_id="t", nonce=b"short")),
                ("Claim", pb.ClaimRequest(session_id="", nonce=nonce(2))),
                ("Transfer", pb.TransferRequest(session_id="s", nonce=nonce(2))),
                ("Transfer", pb.TransferRequest(**{**good, "nonce": b""})),
                ("Put", pb.PutRequest(session_id="s", token=good["token"], value=bytes(4097))),
                ("OwnedBy", pb.OwnedByRequest(node="", page_size=1)),
                ("OwnedBy", pb.OwnedByRequest(node="a", after="/")),
                ("Register", pb.LeaseRequest(incarnation=nonce(1), ttl_ms=1)),
                ("Register", pb.LeaseRequest(incarnation=b"", ttl_ms=1000)),
                ("Lease", pb.LeaseQuery(node="\n")),
            ):
                reason, code = await refusal(call(method, request))
                assert reason in ("over_limit", "malformed"), method
                assert code is grpc.StatusCode.INVALID_ARGUMENT
            await channel.close()
            assert (await directory.state()).revision == token.revision

    run(work())


def test_a_renewed_certificate_is_used_from_the_next_call_on(place):
    async def work():
        async with kept(place) as (_, ways, _):
            way = ways["a"]
            await way.claim("s", "a", nonce(1))
            credentials, first = way._opened
            renewed = dataclasses.replace(credentials)
            way._source = dataclasses.make_dataclass("Source", ["present"])(renewed)
            way._source.current = lambda max_age_s=0.0: renewed
            assert (await way.owner("s")).node == "a"
            assert way._opened[0] is renewed and way._opened[1] is not first

    run(work())


def test_addresses_of_another_node_need_credentials_and_a_pin(place):
    live = LiveCredentials(place.parties / "a")
    with pytest.raises(UsageError, match="needs this node's credentials"):
        open_directory("grpc://keeper@127.0.0.1:1")
    with pytest.raises(CredentialsError, match="nobody"):
        open_directory("grpc://nobody@127.0.0.1:1", live)
    open_directory("grpc://keeper@[::1]:1", live)


# --- Two nodes, of which one has the file. ---


def test_a_session_moves_between_two_nodes_that_share_one_nodes_file(world):
    async def work():
        keeping = dataclasses.replace(world.config("source"), share_directory=True)
        async with (
            running(keeping) as source,
            NodeClient(world.credentials("client"), "source", source.address) as giving,
        ):
            away = dataclasses.replace(
                world.config("target"), directory_url=f"grpc://source@{source.address}"
            )
            async with (
                running(away) as target,
                NodeClient(world.credentials("client"), "target", target.address) as taking,
            ):
                twin = await giving.append(await giving.open("twin"), prompt(90))
                await move(giving, target, await giving.open("s"), prompt(90))
                there = await taking.get("s")
                assert await events(taking, there, 90, 6) == await events(giving, twin, 90, 6)
                await move(taking, source, await taking.get("s"))
                here = await giving.get("s")
                assert here.token.revision > there.token.revision
                lease = await source.sessions.directory.lease("target")
                assert lease.left_s > 0
            assert (await source.sessions.directory.lease("target")).left_s == 0

    run(work())


def test_a_directory_of_another_node_cannot_be_shared_and_an_absent_one_ends_the_start(world):
    async def work():
        for share, kind in ((True, UsageError), (False, DirectoryError)):
            config = dataclasses.replace(
                world.config("target"),
                directory_url="grpc://source@127.0.0.1:1",
                share_directory=share,
            )
            with pytest.raises(kind):
                async with running(config):
                    pass

    run(work())
