"""``/slots`` as llama-server's users call them, against a real node, by curl's own requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import subprocess

import harness
import httpx2
import pytest
from node_support import prompt

from engine import DecodingState
from node.errors import RunCancelledError
from node.http import slots as slots_module
from node.serving.options import ServingOptions
from node.serving.order import Finished, Rung, RunOrder
from node.serving.reuse import ForeignTrail


@contextlib.asynccontextmanager
async def slotted(folder, model_dir, saves=True, **http):
    """``(node, client)`` of a node with two slots that keeps nothing but what they hold."""
    options = ServingOptions(slots=2, slot_save_path=folder / "slots" if saves else None)
    async with (
        harness.web_node(folder / "data", model_dir, options, **http) as web,
        httpx2.AsyncClient(base_url=web.base_url, timeout=30) as client,
    ):
        yield web, client


async def answered(web, ids, tenant=None, tokens=4):
    """The last event of an answer, and the tokens that it gave."""
    tenant = tenant or web.serving.tenants.default
    order = RunOrder(tenant, tuple(ids), DecodingState(), tokens)
    async with web.serving.floor.submit(order) as run:
        async for event in run:
            if isinstance(event, Finished):
                return event, event.token_ids[len(ids) :]
    raise AssertionError("no end")


def act(client, slot, action, **body):
    headers = body.pop("headers", None)
    return client.post(f"/slots/{slot}", params={"action": action}, json=body, headers=headers)


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


async def where(client):
    """Index of the slot that holds something, and how many tokens."""
    (found,) = [(one["id"], one["n_past"]) for one in (await client.get("/slots")).json()
                if one["n_past"]]  # fmt: skip
    return found


def test_a_saved_slot_is_restored_after_a_restart_and_nothing_of_it_is_computed_again(
    tmp_path, model_dir
):
    ids = prompt(700)

    async def work():
        async with slotted(tmp_path, model_dir) as (web, client):
            _, said = await answered(web, ids)
            slot, held = await where(client)
            saved = (await act(client, slot, "save", filename="one.bin")).json()
            pack = tmp_path / "slots" / "one.bin"
            assert saved == {
                "id_slot": slot, "filename": "one.bin", "n_saved": held,
                "n_written": pack.stat().st_size, "timings": saved["timings"],
            }  # fmt: skip
            assert saved["timings"]["save_ms"] > 0 and held == 703
            longer, expected = await answered(web, [*ids, *said], tokens=12)
            assert longer.usage.rung is Rung.CURRENT
        # What the store of cuts kept would do, too: it must not be what does.
        shutil.rmtree(tmp_path / "data" / "store")
        async with slotted(tmp_path, model_dir) as (web, client):
            restored = (await act(client, 1, "restore", filename="one.bin")).json()
            assert restored == {
                "id_slot": 1, "filename": "one.bin", "n_restored": 703,
                "n_read": saved["n_written"], "timings": restored["timings"],
            }  # fmt: skip
            assert await where(client) == (1, 703)
            again, came = await answered(web, [*ids, *said], tokens=12)
            assert (again.usage.rung, again.usage.evaluated_tokens) == (Rung.CURRENT, 1)
            assert came == expected

    harness.within(work())


def test_the_list_and_the_properties_have_llama_servers_shape(tmp_path, model_dir):
    async def work():
        async with slotted(tmp_path, model_dir) as (web, client):
            await answered(web, prompt(40))
            listed = (await client.get("/slots")).json()
            assert [one["id"] for one in listed] == [0, 1]
            assert not any(one["is_processing"] for one in listed)
            assert listed[0]["n_ctx"] == web.serving.facts.max_context
            properties = (await client.get("/props")).json()
            assert properties["total_slots"] == 2
            assert properties["default_generation_settings"]["n_ctx"] == listed[0]["n_ctx"]
            assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
            async with web.serving.floor.lend(0), web.serving.floor.lend(1):
                answer = await client.get("/slots?fail_on_no_slot=1")
                assert code(answer) == (503, "no_slot")

    harness.within(work())


def test_an_erased_slot_holds_nothing(tmp_path, model_dir):
    async def work():
        async with slotted(tmp_path, model_dir, saves=False) as (web, client):
            await answered(web, prompt(40))
            slot, held = await where(client)
            erased = await act(client, slot, "erase")
            assert erased.json() == {"id_slot": slot, "n_erased": held}
            assert (await act(client, slot, "erase")).json()["n_erased"] == 0
            assert all(not one["n_past"] for one in (await client.get("/slots")).json())

    harness.within(work())


def test_what_is_no_slot_action_or_file_is_refused_and_the_slot_is_as_before(tmp_path, model_dir):
    async def work():
        async with slotted(tmp_path, model_dir) as (web, client):
            await answered(web, prompt(300))
            slot, held = await where(client)
            await act(client, slot, "save", filename="good")
            pack = tmp_path / "slots" / "good"
            whole = pack.read_bytes()
            flipped = bytearray(whole)
            flipped[len(whole) // 2] ^= 1
            for name, content in (
                ("short", whole[:-1]), ("long", whole + b"x"), ("flipped", bytes(flipped)),
                ("none", b""), ("text", b"hello" * 400),
            ):  # fmt: skip
                (tmp_path / "slots" / name).write_bytes(content)
            (tmp_path / "slots" / "link").symlink_to("/etc/hostname")
            other = 1 - slot
            refused = [
                (slot, "restore", {"filename": "short"}, 400, 403),
                (slot, "restore", {"filename": "long"}, 400, 403),
                (slot, "restore", {"filename": "flipped"}, 400, 403),
                (slot, "restore", {"filename": "none"}, 400),
                (slot, "restore", {"filename": "text"}, 400),
                (slot, "restore", {"filename": "link"}, 400),
                (slot, "restore", {"filename": "missing"}, 404),
                (slot, "restore", {"filename": "../good"}, 400),
                (slot, "restore", {}, 400),
                (slot, "save", {"filename": "/tmp/x"}, 400),
                (slot, "save", {"filename": "link"}, 400),
                (slot, "save", {"filename": 5}, 400),
                (other, "save", {"filename": "x"}, 409),
                (slot, "drop", {}, 400),
                (slot, "", {}, 400),
                (2, "erase", {}, 404),
                (-1, "erase", {}, 404),
                ("x", "erase", {}, 404),
                ("9" * 30, "erase", {}, 404),
            ]
            for number, action, body, *statuses in refused:
                answer = await act(client, number, action, **body)
                assert answer.status_code in statuses, (number, action, body, answer.text)
                assert answer.json()["error"]["message"]
            assert await where(client) == (slot, held)
            assert sorted(one.name for one in (tmp_path / "slots").iterdir()) == sorted(
                ("good", "short", "long", "flipped", "none", "text", "link")
            )
            assert pack.read_bytes() == whole

    harness.within(work())


def test_a_node_without_a_folder_says_how_to_start_it(tmp_path, model_dir):
    async def work():
        async with slotted(tmp_path, model_dir, saves=False) as (_, client):
            answer = await act(client, 0, "save", filename="x")
            assert code(answer) == (501, "not_supported")
            assert "--slot-save-path" in answer.json()["error"]["message"]

    harness.within(work())


def test_a_pack_of_another_model_or_build_is_not_taken_for_this_ones(
    tmp_path, model_dir, monkeypatch
):
    async def work():
        async with slotted(tmp_path, model_dir) as (web, client):
            await answered(web, prompt(100))
            slot, held = await where(client)
            await act(client, slot, "save", filename="one")
            binding = web.serving.tenants.binding(web.serving.tenants.default)
            (name, _), *rest = binding.numerics.values
            numerics = dataclasses.replace(binding.numerics, values=((name, "other"), *rest))
            changed = dataclasses.replace(binding, numerics=numerics)
            monkeypatch.setattr(type(web.serving.tenants), "binding", lambda *_: changed)
            assert code(await act(client, 1 - slot, "restore", filename="one")) == (
                409, "consent_needed",
            )  # fmt: skip
            taken = await act(client, 1 - slot, "restore", filename="one", accept_compatible=True)
            assert taken.json()["n_restored"] == held
            async with web.serving.floor.lend(1 - slot) as lent:
                # No cut of it may say that its rows are of this node's numerics.
                assert isinstance(lent.held.stream.trail, ForeignTrail)
            again = await act(client, 1 - slot, "save", filename="two")
            assert code(again) == (409, "consent_needed")
        async with slotted(tmp_path, harness.TRAINED) as (_, client):
            answer = await act(client, 0, "restore", filename="one")
            assert answer.status_code in (403, 409), answer.text

    harness.within(work())


def test_tenants_neither_save_nor_erase_each_others_contexts(tmp_path, model_dir):
    keys, (mine, other, admin) = harness.two_tenants(tmp_path)

    async def work():
        async with slotted(tmp_path, model_dir, api_key_file=keys) as (web, client):
            await answered(web, prompt(100), "mine")
            for number in (0, 1):
                # The answer is the same whether the slot is empty or somebody else's.
                answer = await act(client, number, "save", filename="x", headers=other)
                assert code(answer) == (409, "slot_empty")
                erased = await act(client, number, "erase", headers=other)
                assert erased.json() == {"id_slot": number, "n_erased": 0}
            saved = await act(client, 0, "save", filename="x", headers=mine)
            assert saved.json()["n_saved"] == 103
            for headers, status in ((other, 404), (admin, 404), (mine, 200)):
                answer = await act(client, 1, "restore", filename="x", headers=headers)
                assert answer.status_code == status
            assert (await client.get("/slots", headers=mine)).status_code == 403
            assert (await client.get("/slots", headers=admin)).status_code == 200
            assert (await client.get("/slots")).status_code == 401
            # Another tenant's answer does not go on in it.
            theirs, _ = await answered(web, prompt(120), "other")
            assert theirs.usage.cached_tokens == 0

    harness.within(work())


def test_an_action_waits_for_the_answer_in_its_slot_but_not_for_ever(
    tmp_path, model_dir, monkeypatch
):
    async def work():
        async with slotted(tmp_path, model_dir) as (web, client):
            order = RunOrder("local", tuple(prompt(40)), DecodingState(), 30)
            run = web.serving.floor.submit(order)
            erasing = asyncio.create_task(act(client, 0, "erase"))
            async for _ in run:
                pass
            assert (await erasing).json()["n_erased"] > 40
            monkeypatch.setattr(slots_module, "WAIT_S", 0.1)
            run = web.serving.floor.submit(RunOrder("local", (1, 2), DecodingState(), 4000))
            (busy,) = [s.index for s in web.serving.floor.status().slots if s.running_s]
            answer = await act(client, busy, "erase")
            assert answer.status_code == 429 and "Retry-After" in answer.headers
            run.cancel()
            with pytest.raises(RunCancelledError):
                async for _ in run:
                    pass

    harness.within(work())


def test_curl_saves_and_restores_as_llama_servers_readme_says(tmp_path):
    def curl(node, path, body):
        return json.loads(
            subprocess.run(
                ["curl", "-s", "-m", "20", node.base_url + path, "-H",
                 "Content-Type: application/json", "-d", json.dumps(body)],
                capture_output=True, check=True,
            ).stdout
        )  # fmt: skip

    talk = {"messages": [{"role": "user", "content": "It was a dark night. " * 20}],
            "max_tokens": 8, "temperature": 0}  # fmt: skip
    place = ("--slot-save-path", str(tmp_path / "slots"), "--slots", "1")
    with harness.served(tmp_path / "data", *place) as node:
        first = curl(node, "/v1/chat/completions", talk)
        saved = curl(node, "/slots/0?action=save", {"filename": "talk"})
        assert saved["n_saved"] > 100
        assert curl(node, "/slots/0?action=erase", {})["n_erased"] == saved["n_saved"]
        restored = curl(node, "/slots/0?action=restore", {"filename": "talk"})
        assert restored["n_restored"] == saved["n_saved"]
        again = curl(node, "/v1/chat/completions", talk)
        text = [one["choices"][0]["message"]["content"] for one in (first, again)]
        assert text[0] == text[1]
