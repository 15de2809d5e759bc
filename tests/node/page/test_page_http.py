"""The page over HTTP: who sees it, under which policy, and what its stream tells."""

from __future__ import annotations

import asyncio
import contextlib
import json

import harness
import httpx2
import page_scene as scene

from node.http.auth import add_key
from node.page.assets import ASSETS
from node.page.feed import VIEWERS_MAX, StatusPage

PATHS = ("/", "/metrics", "/page/events", "/page/page.css")


@contextlib.asynccontextmanager
async def node(tmp_path, model_dir, **options):
    async with (
        harness.web_node(tmp_path / "data", model_dir, **options) as web,
        httpx2.AsyncClient(base_url=web.base_url, timeout=10) as client,
    ):
        yield web, client


async def events(client, count: int, **options) -> list[dict]:
    """The first ``count`` events of the page's stream."""
    found: list[dict] = []
    async with client.stream("GET", "/page/events", **options) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
    return found


def test_everything_is_served_under_one_strict_policy(tmp_path, model_dir):
    async def look():
        async with node(tmp_path, model_dir) as (_, client):
            page = await client.get("/")
            for answer in (page, await client.get("/" + ASSETS["page.js"].url)):
                assert answer.status_code == 200
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy and "*" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
            assert page.headers["cache-control"] == "no-store"
            for name, asset in ASSETS.items():
                assert asset.url in page.text
                answer = await client.get(f"/page/{name}")
                assert (answer.content, answer.headers["content-type"]) == (
                    asset.body, asset.media_type,
                )  # fmt: skip
                same = {"if-none-match": answer.headers["etag"]}
                assert (await client.get(f"/page/{name}", headers=same)).status_code == 304
            for path in ("/page/page.html", "/page/..%2fdocument.py", "/page/"):
                assert (await client.get(path)).status_code == 404

    harness.within(look())


def test_only_what_changed_is_told(tmp_path, model_dir):
    async def look():
        async with node(tmp_path, model_dir) as (web, client):
            door = web.node.entrance.door

            class Quiet:
                node, recorder, reads = "studio", scene.recorder(), 0

                def status(self):
                    self.reads += 1
                    if self.reads == 3:
                        self.recorder.refuse("draining")
                    return scene.status()

            door.desk.page = StatusPage(Quiet(), door.stopping, look_s=0.02)
            first, second = await events(client, 2)
            assert set(first) == set(door.desk.page.parts())
            assert set(second) == {"refusals"}
            assert "being stopped" in second["refusals"]

    harness.within(look())


def test_one_viewer_too_many_is_sent_away_and_a_place_becomes_free(tmp_path, model_dir):
    async def look():
        async with node(tmp_path, model_dir) as (_, client):
            # Kept: a dropped iterator ends its stream.
            open_pages = []
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(VIEWERS_MAX):
                    stream = client.stream("GET", "/page/events")
                    answer = await stack.enter_async_context(stream)
                    open_pages.append(answer.aiter_lines())
                    await anext(open_pages[-1])
                assert (await client.get("/page/events")).status_code == 429
                assert (await client.get("/")).status_code == 200
            async with asyncio.timeout(5):
                while (await events(client, 1)) == []:
                    await asyncio.sleep(0.05)

    harness.within(look())


def test_an_open_page_does_not_keep_a_node_from_stopping(tmp_path, model_dir):
    async def look():
        async with httpx2.AsyncClient(timeout=10) as client:
            stopped = contextlib.AsyncExitStack()
            web = await stopped.enter_async_context(harness.web_node(tmp_path / "data", model_dir))
            async with client.stream("GET", f"{web.base_url}/page/events") as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                async with asyncio.timeout(5):
                    await stopped.aclose()
                    told = [line async for line in lines]
            assert "Draining" in "".join(told)

    harness.within(look())


def test_a_keyed_node_shows_itself_to_administrators_alone(tmp_path, model_dir):
    keys = tmp_path / "keys"
    admin = add_key(keys, "ops", is_admin=True)
    tenant = add_key(keys, "someone")

    async def look():
        async with node(tmp_path, model_dir, api_key_file=keys) as (_, client):
            for path in PATHS:
                refused = await client.get(path)
                assert refused.status_code == 401, path
                assert "Basic" in refused.headers["www-authenticate"]
                for key, status in (("wrong", 401), (tenant, 403)):
                    assert (await client.get(path, auth=("any", key))).status_code == status
                if path != "/page/events":
                    assert (await client.get(path, auth=("any", admin))).status_code == 200
            assert (await events(client, 1, auth=("any", admin)))[0]["health"]
            bearer = {"authorization": f"Bearer {admin}"}
            assert (await client.get("/metrics", headers=bearer)).status_code == 200

    harness.within(look())


def test_a_node_whose_state_is_uncertain_says_so(tmp_path, model_dir):
    async def look():
        async with node(tmp_path, model_dir) as (web, client):
            assert 'kvpack_health{state="ok"} 1.0' in (await client.get("/metrics")).text
            web.serving.floor.health.latch(MemoryError())
            scraped = (await client.get("/metrics")).text
            assert 'kvpack_health{state="ok"} 0.0' in scraped
            assert 'kvpack_health{state="unhealthy"} 1.0' in scraped
            page = (await client.get("/")).text
            assert "Unhealthy: restart this node" in page and "MemoryError" in page

    harness.within(look())
