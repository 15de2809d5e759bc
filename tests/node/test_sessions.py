"""Sessions over gRPC: tokens that went stale, bounds, bad input, saving, closing, hanging up."""

from __future__ import annotations

import asyncio
import stat
import threading
from pathlib import Path

import pytest
from node_support import events, move, prompt, run

from kvpack.keys import Keyring, load_key_file
from kvpack.verify import verify_bundle
from node.errors import PeerAnswerError
from node.pb.v1 import session_pb2 as pb


async def reason(work) -> str:
    with pytest.raises(PeerAnswerError) as refused:
        await work
    return refused.value.peer_reason


def test_calls_under_a_stale_or_foreign_token_change_nothing(world):
    async def work():
        async with world.node("source") as (node, client):
            session = await client.append(await client.open("s"), prompt(20))
            other = await client.open("other")
            for token in (other.token, type(session.token)()):
                fake = pb.SessionReply(session_id="s", token=token)
                assert await reason(client.append(fake, [1])) in ("stale_token", "over_limit")
                assert await reason(client.save(fake)) in ("stale_token", "over_limit")
                assert await reason(client.close_session(fake)) in ("stale_token", "over_limit")
                assert await reason(events(client, fake, 20, 1)) in ("stale_token", "over_limit")
            # The directory says otherwise: then what we remember is worth nothing.
            live = await node.sessions.find("s")
            await node.sessions.directory.transfer("s", live.token, "target", bytes(16))
            assert await reason(client.append(session, [1])) == "stale_token"
            assert live.next_index == 20 and live.position == 19
            assert await reason(client.get("s")) == "session_moved"

    run(work())


def test_bad_input_gets_a_reason_and_the_session_stays_as_it_was(world):
    async def work():
        async with world.node("source") as (node, client):
            assert await reason(client.open("../s")) == "over_limit"
            session = await client.open("s")
            assert await reason(client.open("s")) == "session_exists"
            assert await reason(client.get("unknown")) == "session_not_found"
            assert await reason(client.append(session, [5, 4000])) == "over_limit"
            assert await reason(client.append(session, [0] * 131_073)) == "session_state"
            assert await reason(events(client, session, 1, 1)) == "session_state"
            assert await reason(client.save(session)) == "session_state"
            assert await reason(move(client, node, session)) == "session_state"
            assert (await client.get("s")).next_index == 0

    run(work())


def test_a_move_to_an_unknown_or_unreachable_node_leaves_the_session_serving(world):
    async def work():
        async with world.pair() as (source, giving, target, _):
            session = await giving.append(await giving.open("s"), prompt(30))
            request = {"session_id": "s", "token": session.token}

            async def failing(**where):
                async for _ in giving.migrate(pb.MigrateRequest(**request, **where)):
                    pass

            port = str(target.address)
            assert await reason(failing(target_node="nobody", target_address=port))
            assert await reason(failing(target_node="target", target_address="nonsense")) == "usage"
            closed = failing(target_node="target", target_address="127.0.0.1:1")
            assert await reason(closed) == "transfer_failed"
            wrong = failing(target_node="third", target_address=port)
            assert await reason(wrong) == "transfer_failed"
            assert len(await events(giving, session, 30, 4)) == 4
            assert (await source.sessions.directory.owner("s")).node == "source"

    run(work())


def test_a_saved_session_is_a_private_pack_that_verifies_and_is_never_replaced(world):
    async def work():
        async with world.node("source") as (_, client):
            session = await client.append(await client.open("s"), prompt(100))
            saved = await client.save(session)
            path = Path(saved.path)
            assert path.parent == world.root / "source-data" / "packs"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert (saved.position, saved.file_bytes) == (99, path.stat().st_size)
            key = load_key_file(world.credentials("source") / "tenant.key")
            verify_bundle(path, Keyring([key]))
            assert await reason(client.save(session)) == "publish_failed"
            await events(client, session, 100, 5)
            later = await client.save(await client.get("s"))
            assert later.position == 104
            assert len(await events(client, await client.get("s"), 104, 3)) == 3

    run(work())


def test_a_spooled_pack_is_the_pack_that_the_source_would_have_saved(world):
    async def work():
        async with world.pair() as (_, giving, target, _):
            twin = await giving.append(await giving.open("twin"), prompt(600))
            saved = Path((await giving.save(twin)).path)
            await move(giving, target, await giving.open("s"), prompt(600))
            spooled = world.root / "target-data" / "spool" / "source.1.1.kvpack"
            key = load_key_file(world.credentials("source") / "tenant.key")
            reports = [verify_bundle(path, Keyring([key])) for path in (saved, spooled)]
            # The same objects, in the order in which they became final instead of by kind.
            assert saved.stat().st_size == spooled.stat().st_size
            return reports

    run(work())


def test_closing_frees_the_id_and_a_moved_pack(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            await move(giving, target, await giving.open("s"), prompt(30))
            assert len(world.spool("target")) == 1
            await taking.close_session(await taking.get("s"))
            assert world.spool("target") == []
            assert (await giving.open("s")).next_index == 0

    run(work())


def test_a_client_that_hangs_up_in_mid_prefill_leaves_a_session_that_goes_on(world):
    async def work():
        async with world.node("source") as (_, client):
            session = await client.open("s")
            appending = asyncio.create_task(client.append(session, prompt(1500)))
            await asyncio.sleep(0.15)
            appending.cancel()
            await asyncio.wait({appending})
            twin = await client.append(await client.open("twin"), prompt(1500))
            found = await client.get("s")
            if found.next_index == 0:
                return
            assert await events(client, found, 1500, 4) == await events(client, twin, 1500, 4)

    run(work())


def test_a_prompt_is_computed_on_the_absolute_grid_however_it_was_given(world):
    async def schedule(node, client, name, parts):
        session = await client.open(name)
        for part in parts:
            session = await client.append(session, part)
        generation = (await node.sessions.find(name)).generation
        return [(run.call_tokens, run.calls) for run in generation.schedule.runs]

    async def work():
        async with world.node("source") as (node, client):
            tokens = prompt(1300)
            whole = await schedule(node, client, "whole", [tokens])
            halves = await schedule(node, client, "halves", [tokens[:700], tokens[700:]])
            # The boundary token is never part of a prefill call.
            assert whole == [(512, 2), (275, 1)]
            assert halves == [(512, 1), (187, 1), (325, 1), (275, 1)]

    run(work())


class Held:
    """A call of a session that stands on the engine's thread until it is let go."""

    def __init__(self, session, name) -> None:
        self._call, self.entered, self._go = getattr(session, name), False, threading.Event()
        setattr(session, name, self._once)
        self._session, self._name = session, name

    def _once(self, *given):
        setattr(self._session, self._name, self._call)
        self.entered = True
        assert self._go.wait(10)
        return self._call(*given)

    def let_go(self) -> None:
        self._go.set()


async def left_in(session, name, work) -> Held:
    """``work``, cancelled while its call is under way."""
    held = Held(session, name)
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(10):
        while not held.entered:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.sleep(0.05)
    return held


async def generated(sessions, session, start, count):
    steps = sessions.generate(session.session_id, session.token, start, count)
    return [(decoded.index, decoded.token_id) async for _, decoded in steps]


def test_a_step_whose_reader_hung_up_is_given_to_the_next_one_and_not_passed_over(world):
    async def work():
        async with world.node("source") as (node, client):
            sessions = node.sessions
            for name in ("s", "twin"):
                await client.append(await client.open(name), prompt(40))
            session, twin = await sessions.find("s"), await sessions.find("twin")
            held = await left_in(session, "decode_next", generated(sessions, session, 40, 1))
            again = asyncio.ensure_future(generated(sessions, session, 40, 4))
            await asyncio.sleep(0.1)
            held.let_go()
            assert await again == await generated(sessions, twin, 40, 4)

    run(work())


def test_a_prefill_whose_client_hung_up_ends_before_the_next_call_is_measured(world):
    async def work():
        async with world.node("source") as (node, client):
            sessions = node.sessions
            session = await sessions.find((await client.open("s")).session_id)
            twin = await client.append(await client.open("twin"), prompt(600))

            async def append(token_ids):
                async with sessions.hold("s", session.token):
                    await sessions.append(session, token_ids)

            held = await left_in(session, "prefill_next", append(prompt(600)))
            again = asyncio.ensure_future(generated(sessions, session, 600, 4))
            await asyncio.sleep(0.1)
            held.let_go()
            assert await again == await generated(
                sessions, await sessions.find("twin"), twin.next_index, 4
            )
            runs = session.generation.schedule.runs
            assert [(one.call_tokens, one.calls) for one in runs] == [(512, 1), (87, 1), (1, 4)]

    run(work())


def test_text_becomes_tokens_and_back_while_the_engine_is_at_work(world):
    async def work():
        async with world.node("source") as (node, client):
            go = threading.Event()
            busy = asyncio.ensure_future(node.sessions.engine.call(go.wait, 10))
            try:
                async with asyncio.timeout(5):
                    token_ids = await client.tokenize("a long text")
                    assert await client.detokenize(token_ids) == "a long text"
                assert not busy.done()
            finally:
                go.set()
                await busy

    run(work())


def test_lists_are_paged(world):
    async def work():
        async with world.node("source") as (node, client):
            for name in ("c", "a", "b"):
                await client.open(name)
            first, after = node.sessions.page("", 2)
            rest, end = node.sessions.page(after, 2)
            assert [s.session_id for s in (*first, *rest)] == ["a", "b", "c"]
            assert (after, end) == ("b", "")

    run(work())


def test_logs_hold_no_tokens_and_no_keys(world, caplog):
    async def work():
        async with world.pair() as (_, giving, target, _):
            await move(giving, target, await giving.open("s"), prompt(50))

    caplog.set_level("DEBUG", logger="node")
    run(work())
    key = (world.root / "tenant.key").read_text().split("root: ")[1][:16]
    assert "committed" in caplog.text
    assert key not in caplog.text
    assert ", ".join(map(str, prompt(50)[:3])) not in caplog.text
