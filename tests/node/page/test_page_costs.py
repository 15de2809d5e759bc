"""What kept rows save, on the page: what was measured on this node, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import threading

import harness
import httpx2
import page_scene as scene
import pytest

from node.economics.book import Book
from node.economics.looking import BookLook
from node.economics.summary import Economy, Rate, economy_of
from node.economics.values import CutCost, Prefill, Restored, Tier
from node.page.costs_part import costs_part


def part(economy) -> str:
    """The part as a reader sees it."""
    status = dataclasses.replace(scene.status(), economy=economy)
    return " ".join(re.sub(r"<[^>]+>", " ", costs_part(status)).split())


def test_four_facts_each_with_what_it_is_of():
    said = part(scene.economy())
    # 10,240 tokens in 20 s of the engine's time.
    assert "Prefill 512 tokens/s over 10,240 tokens of 2 cuts" in said
    assert "Restore from memory 84 ms for 8,192 tokens, 182 MiB, once" in said
    assert "Restore from disk 340 ms for 8,192 tokens, 182 MiB, median of 3" in said
    assert "A miss there costs 17 s more: computing them took 17 s" in said
    # 8,192 tokens in 17 s are 164 in 0.34 s.
    assert "Break-even 164 tokens: as many are computed in the time of that restore" in said
    assert "Measured on this node." in said and "Not measured yet" not in said


@pytest.mark.parametrize(
    ("economy", "words"),
    [
        (None, "This node keeps no rows, so there is nothing to compare."),
        (Economy(), "Nothing was measured yet: it begins"),
        (Economy(Rate(100, 2.0, 1)), "Not measured yet: no restore."),
    ],
)
def test_what_was_not_measured_is_said(economy, words):
    said = part(economy)
    assert words in said
    assert not re.search(r"\d", said) or economy == Economy(Rate(100, 2.0, 1))


def cost(tokens, prefill=None, **seconds):
    restores = tuple(Restored(Tier[tier.upper()], times) for tier, times in seconds.items())
    return CutCost(tokens.to_bytes(4, "big"), tokens, 10 * tokens, prefill, restores)


def test_a_restore_without_its_prefill_makes_no_comparison():
    # A part of it was computed: that is no measure of the whole.
    economy = economy_of([cost(4096, Prefill(2048, 2048, 2.0, 2.0), disk=(0.5,))])
    (saving,) = economy.savings
    assert (saving.prefill_s, saving.miss_s, saving.break_even_tokens) == (None, None, None)
    said = part(economy)
    assert "A miss" not in said and "Break-even" not in said
    assert "Not measured yet: no cut both computed and brought back." in said


def test_of_two_cuts_the_one_that_can_be_compared_stands_for_its_tier():
    costs = [cost(8192, disk=(0.9,)), cost(512, Prefill(0, 512, 1.0, 1.0), disk=(0.1,))]
    (saving,) = economy_of(costs).savings
    assert (saving.tokens, saving.break_even_tokens) == (512, 52)


def test_a_restore_that_is_slower_is_said_to_be():
    economy = economy_of([cost(64, Prefill(0, 64, 0.1, 0.1), disk=(0.4,))])
    assert "A miss there saves 300 ms: computing them took 100 ms" in part(economy)


def test_calls_that_took_no_time_give_no_rate():
    assert economy_of([cost(64, Prefill(0, 64, 0.1, 0.0))]).rate is None


def test_the_book_is_read_again_where_something_was_written(tmp_path):
    book = Book(tmp_path / "economics.sqlite")
    looked = BookLook(book)
    reads = []
    plain, book.read = book.read, lambda: reads.append(1) or plain()

    async def work():
        await looked.look()
        await looked.look()
        assert (looked.economy, len(reads)) == (Economy(), 1)
        await asyncio.to_thread(book.computed, b"c", 512, 5120, Prefill(0, 512, 1.0, 1.0))
        await looked.look()
        assert looked.economy.rate == Rate(512, 1.0, 1) and len(reads) == 2

    with contextlib.closing(book):
        asyncio.run(work())


def test_a_book_that_hangs_does_not_hold_a_page_and_one_that_is_broken_neither(tmp_path, caplog):
    path = tmp_path / "economics.sqlite"
    path.write_bytes(b"no database at all" * 100)
    path.chmod(0o600)
    broken = Book(path)

    go_on = threading.Event()

    class Hanging:
        written = 0

        def read(self):
            go_on.wait(20.0)
            return [cost(64, Prefill(0, 64, 0.1, 0.1))]

    async def work():
        looked = BookLook(broken)
        await looked.look()
        assert looked.economy == Economy() and "is not shown" in caplog.text
        slow = BookLook(Hanging())
        async with asyncio.timeout(10.0):
            await slow.look()
            assert slow.economy == Economy()
            go_on.set()
            while slow.economy.rate is None:
                await slow.look()

    with contextlib.closing(broken):
        asyncio.run(work())


def test_a_real_node_shows_what_it_measured(tmp_path, model_dir):
    async def look():
        async with (
            harness.web_node(tmp_path / "data", model_dir) as web,
            httpx2.AsyncClient(base_url=web.base_url, timeout=20) as client,
        ):
            page = (await client.get("/")).text
            assert "Nothing was measured yet:" in page
            body = {"prompt": [(7 * i) % 251 for i in range(600)], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            # Cuts are kept one after the other, in the background.
            async with asyncio.timeout(20):
                said = None
                while said is None or said not in page:
                    await asyncio.sleep(0.1)
                    costs = (await client.get("/kvpack/economics")).json()["cuts"]
                    made = [one["prefill"]["computed_tokens"] for one in costs if one["prefill"]]
                    said = f"over {sum(made):,} tokens of" if made else None
                    page = (await client.get("/")).text

    harness.within(look())
