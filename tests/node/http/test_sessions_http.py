"""Sessions over HTTP: looked at, saved, brought back, moved, given up, each tenant its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import harness
import httpx2
import pytest
from node_support import World, prompt

from node.config import Address
from node.directory import Ownership
from node.http.options import HttpOptions
from node.server import running

SESSIONS = "/kvpack/sessions"


@contextlib.asynccontextmanager
async def alone(folder, model_dir, **http):
    """``(node, client)`` of a node without gRPC."""
    async with (
        harness.web_node(folder / "data", model_dir, **http) as web,
        httpx2.AsyncClient(base_url=web.base_url, timeout=30) as client,
    ):
        yield web, client


@contextlib.asynccontextmanager
async def both(world: World, name: str):
    """``(node, client)`` of an enrolled node that has a port of each kind."""
    http = HttpOptions(Address("127.0.0.1", 0), drain_s=2.0)
    config = dataclasses.replace(world.config(name), http=http)
    async with (
        running(config) as node,
        httpx2.AsyncClient(base_url=node.entrance.url, timeout=30) as client,
    ):
        yield node, client


async def opened(sessions, name, tokens=300, tenant=""):
    """A session of that many tokens."""
    session = await sessions.open(name)
    session.tenant = tenant
    await sessions.append(session, prompt(tokens))
    return session


async def says(node, session, count=8):
    """``(token, logits)`` of what it says next."""
    index, found = session.next_index, []
    async for _, decoded in node.sessions.generate(session.session_id, session.token, index, count):
        found.append((decoded.token_id, decoded.logits.data))
    return found


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


def test_sessions_are_listed_by_name_and_shown_without_their_text(tmp_path, model_dir):
    async def work():
        async with alone(tmp_path, model_dir) as (web, client):
            for name in ("c", "a", "transient.x", "b"):
                await opened(web.node.sessions, name, 40)
            page = (await client.get(SESSIONS, params={"limit": 2})).json()
            assert [one["id"] for one in page["data"]] == ["a", "b"] and page["has_more"]
            page = (await client.get(SESSIONS, params={"after": page["last_id"]})).json()
            assert [one["id"] for one in page["data"]] == ["c"] and not page["has_more"]
            one = (await client.get(f"{SESSIONS}/a")).json()
            assert one == {
                "id": "a", "object": "kvpack.session", "node": "local", "phase": "active",
                "asleep": False, "position": 39, "tokens": 40, "revision": 1,
                "context_epoch": 0, "owner_revision": one["owner_revision"],
            }  # fmt: skip
            for limit in ("0", "101", "x", "-1", "1" * 30):
                assert code(await client.get(SESSIONS, params={"limit": limit}))[0] == 400

    harness.within(work())


def test_a_saved_session_comes_back_under_another_name_and_says_the_same(tmp_path, model_dir):
    async def work():
        async with alone(tmp_path, model_dir) as (web, client):
            session = await opened(web.node.sessions, "s", 700)
            saved = (await client.post(f"{SESSIONS}/s/save", json={})).json()
            pack = tmp_path / "data" / "packs" / "s.kvpack"
            assert saved["n_saved"] == 699 and saved["n_written"] == pack.stat().st_size
            assert saved["filename"] == "s.kvpack" and saved["timings"]["save_ms"] > 0
            expected = await says(web.node, session)
            restored = await client.post(f"{SESSIONS}/t/restore", json={"filename": "s.kvpack"})
            assert restored.json()["n_restored"] == 699
            assert restored.json()["n_read"] == saved["n_written"]
            assert restored.json()["continuation"] == "exact"
            twin = await web.node.sessions.find("t")
            assert twin.next_index == 700 and twin.revision == 1
            assert await says(web.node, twin) == expected
            # A second save replaces the first: it stands further on.
            again = (await client.post(f"{SESSIONS}/s/save", json={})).json()
            assert again["n_saved"] == 707 and len(list(pack.parent.iterdir())) == 1

    harness.within(work())


def test_what_cannot_be_saved_or_brought_back_is_refused_and_changes_nothing(tmp_path, model_dir):
    async def work():
        async with alone(tmp_path, model_dir) as (web, client):
            sessions = web.node.sessions
            await sessions.open("empty")
            await opened(sessions, "s", 40)
            await client.post(f"{SESSIONS}/s/save", json={})
            refused = [
                ("empty/save", {}, (409, "session_state")),
                ("none/save", {}, (404, "session_not_found")),
                ("s/save", {"filename": "../x"}, (400, "over_limit")),
                ("s/save", {"filename": "x", "store": "/y"}, (400, "invalid_request")),
                ("s/save", {"store": "/nowhere"}, (400, "usage")),
                ("s/restore", {}, (409, "session_exists")),
                ("new/restore", {}, (404, "pack_not_found")),
                ("new/restore", {"filename": 7}, (400, "invalid_value")),
                ("new/restore", {"filename": "s.kvpack", "store": "x"}, (400, "invalid_request")),
                ("transient.x/restore", {"filename": "s.kvpack"}, (400, "invalid_request")),
                ("conv_x/restore", {"filename": "s.kvpack"}, (400, "invalid_request")),
                ("a%20b/restore", {"filename": "s.kvpack"}, (400, "over_limit")),
            ]
            for path, body, expected in refused:
                answer = await client.post(f"{SESSIONS}/{path}", json=body)
                assert code(answer) == expected, path
            pack = tmp_path / "data" / "packs" / "s.kvpack"
            content = bytearray(pack.read_bytes())
            content[len(content) // 2] ^= 1
            pack.write_bytes(content)
            damaged = await client.post(f"{SESSIONS}/new/restore", json={"filename": "s.kvpack"})
            assert code(damaged)[0] in (400, 403)
            names = [one.session_id for one in sessions.all()]
            assert sorted(names) == ["empty", "s"]
            assert await sessions.directory.owner("new") is None

    harness.within(work())


def test_a_session_is_given_up_and_a_conversation_is_not_given_up_here(tmp_path, model_dir):
    async def work():
        async with alone(tmp_path, model_dir) as (web, client):
            for name in ("s", "conv_1"):
                await opened(web.node.sessions, name, 40)
            assert (await client.delete(f"{SESSIONS}/s")).json()["deleted"] is True
            assert "s" not in web.node.sessions
            assert not isinstance(await web.node.sessions.directory.owner("s"), Ownership)
            assert code(await client.delete(f"{SESSIONS}/s")) == (404, "session_not_found")
            assert code(await client.delete(f"{SESSIONS}/conv_1")) == (409, "is_conversation")
            assert "conv_1" in web.node.sessions

    harness.within(work())


def test_nobody_reaches_another_tenants_sessions_or_packs(tmp_path, model_dir):
    keys, (mine, other, admin) = harness.two_tenants(tmp_path)

    async def work():
        async with alone(tmp_path, model_dir, api_key_file=keys) as (web, client):
            await opened(web.node.sessions, "s", 40, tenant="mine")
            await opened(web.node.sessions, "own", 40)

            async def names(headers):
                found = (await client.get(SESSIONS, headers=headers)).json()
                return [one["id"] for one in found["data"]]

            assert await names(mine) == ["s"] and await names(other) == []
            assert await names(admin) == ["own"]
            saved = await client.post(f"{SESSIONS}/s/save", json={}, headers=mine)
            assert saved.status_code == 200
            for method, path in (
                ("GET", "s"), ("DELETE", "s"), ("POST", "s/save"), ("GET", "own"),
            ):  # fmt: skip
                body = {} if method == "POST" else None
                answer = await client.request(
                    method, f"{SESSIONS}/{path}", json=body, headers=other
                )
                assert code(answer) == (404, "session_not_found"), path
            missed = await client.post(
                f"{SESSIONS}/new/restore", json={"filename": "s.kvpack"}, headers=other
            )
            assert code(missed) == (404, "pack_not_found")
            # Its file in the other's folder still does not open there.
            packs = tmp_path / "data" / "packs"
            (packs / ".tenant-other" / "s.kvpack").write_bytes(
                (packs / ".tenant-mine" / "s.kvpack").read_bytes()
            )
            stolen = await client.post(
                f"{SESSIONS}/new/restore", json={"filename": "s.kvpack"}, headers=other
            )
            assert stolen.status_code == 403
            body = {"to": "x@127.0.0.1:1"}
            for headers, expected in ((mine, (403, "admin_only")), ({}, (401, "invalid_api_key"))):
                answer = await client.post(f"{SESSIONS}/s/migrate", json=body, headers=headers)
                assert code(answer) == expected
            stored = await client.post(f"{SESSIONS}/s/save", json={"store": "/x"}, headers=mine)
            assert code(stored) == (403, "admin_only")

    harness.within(work())


@pytest.mark.parametrize("stream", [False, True], ids=["answer", "events"])
def test_a_session_moves_to_another_node_and_tells_how_far_it_is(world, stream):
    async def work():
        async with both(world, "source") as (source, client), both(world, "target") as (there, c2):
            session = await opened(source.sessions, "s", 900)
            twin = await opened(source.sessions, "twin", 900)
            body = {"to": f"target@{there.address}", "stream": stream}
            answer = await client.post(f"{SESSIONS}/s/migrate", json=body)
            assert answer.status_code == 200, answer.text
            if stream:
                events = answer.text.split("\n\n")
                assert events[0].startswith("event: progress\ndata: ")
                result = json.loads(events[-2].removeprefix("event: result\ndata: "))
            else:
                result = answer.json()
            assert result["object"] == "kvpack.migration" and result["target_node"] == "target"
            assert result["continuation_verdict"] == "exact" and result["position"] == 899
            assert "s" in there.sessions and "s" not in source.sessions
            moved = await client.get(f"{SESSIONS}/s")
            assert code(moved) == (421, "session_moved")
            assert moved.headers["x-kvpack-node"] == "target"
            assert moved.headers["x-kvpack-address"] == str(there.address)
            assert (await c2.get(f"{SESSIONS}/s")).json()["node"] == "target"
            expected = await says(source, twin, 6)
            here = await there.sessions.find("s")
            # The hand-over chose the first token; nobody was told its logits here.
            assert here.token_ids[900] == expected[0][0]
            assert await says(there, here, 5) == expected[1:]
            assert session.phase.value == "gone"

    harness.within(work())


def test_a_copy_a_store_and_what_cannot_be_moved(world, tmp_path):
    (tmp_path / "stores").mkdir(mode=0o700)
    place = tmp_path / "stores" / "one"

    async def work():
        http = HttpOptions(Address("127.0.0.1", 0), drain_s=2.0)
        config = dataclasses.replace(
            world.config("source"), http=http, store_roots=(tmp_path / "stores",)
        )
        async with (
            running(config) as node,
            world.node("target") as (there, _),
            httpx2.AsyncClient(base_url=node.entrance.url, timeout=30) as client,
        ):
            await opened(node.sessions, "s", 300)

            async def migrate(**body):
                return await client.post(f"{SESSIONS}/s/migrate", json=body)

            to = f"target@{there.address}"
            copied = await migrate(to=to, mode="copy", copy_as="c")
            assert copied.json()["session_id"] == "c" and "s" in node.sessions
            parked = await client.post(f"{SESSIONS}/s/save", json={"store": str(place)})
            assert parked.json()["mode"] == "copy" and "s" in node.sessions
            moved = await migrate(to=f"store:{place}")
            assert moved.json()["mode"] == "move" and "s" not in node.sessions
            assert code(await client.get(f"{SESSIONS}/s"))[1] == "session_moved"
            back = await client.post(f"{SESSIONS}/s/restore", json={"store": str(place)})
            assert back.json()["continuation"] == "exact" and "s" in node.sessions
            as_new = {"store": str(place), "stored_id": "s"}
            another = await client.post(f"{SESSIONS}/s2/restore", json=as_new)
            assert another.status_code == 200, another.text
            for body, status in (
                ({"to": "target"}, 400),
                ({"to": "@127.0.0.1:1"}, 400),
                ({"to": to, "mode": "copy"}, 400),
                ({"to": to, "copy_as": "x"}, 400),
                ({"to": to, "mode": "steal"}, 400),
                ({"to": "stranger@127.0.0.1:1"}, 500),
                ({"to": "target@127.0.0.1:1"}, 502),
                ({}, 400),
            ):
                answer = await migrate(**body)
                assert answer.status_code == status, (body, answer.text)
            assert "s" in node.sessions

    harness.within(work())


def test_a_client_that_stops_watching_does_not_stop_the_move(world):
    async def work():
        async with both(world, "source") as (source, client), both(world, "target") as (there, _):
            await opened(source.sessions, "s", 2500)
            body = {"to": f"target@{there.address}", "stream": True}
            async with client.stream("POST", f"{SESSIONS}/s/migrate", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line:
                        break
            async with asyncio.timeout(20):
                while "s" not in there.sessions or "s" in source.sessions:
                    await asyncio.sleep(0.02)

    harness.within(work())
