"""Economics: times that a real node measured, of cuts that it computed and brought back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import harness
import pytest

from node.config import child_environment
from node.economics.book import CUTS_MAX, RESTORES_MAX, Book
from node.economics.report import NOT_MEASURED, fetch, table
from node.economics.values import Prefill, Tier
from node.errors import PeerAnswerError, PeerUnavailableError, UsageError
from node.records.errors import RecordsError

TEXT = "The sea was calm and the ship went on through the night. " * 20
SECRET = "Captain Zebedee"


def economics(*arguments):
    """``kvnode economics`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "node", "economics", *arguments],
        env=child_environment(harness.ROOT), capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def asked(node):
    """What the command prints, without a process of its own: a busy machine starts few of them."""
    return fetch(node.base_url, "")["cuts"]


def complete(node, prompt):
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    answer = harness.ask(
        f"{node.v1}/completions", "POST", body, **{"Content-Type": "application/json"}
    )
    assert answer[0] == 200, answer
    return json.loads(answer[2])["usage"]


def test_a_cut_that_was_computed_and_brought_back_by_the_next_start_has_both_times(tmp_path):
    """The same without processes of their own: a stop, and a start in the same folder."""
    prompt = f"{SECRET}. {TEXT}"

    async def once(work):
        async with harness.web_node(tmp_path / "data") as node:
            found = await asyncio.to_thread(work, node)
            await node.serving.ladder.settled()
            return found or await asyncio.to_thread(asked, node)

    async def scenario():
        tokens = (await once(lambda node: complete(node, prompt)))["prompt_tokens"]
        (computed,) = [
            cut for cut in await once(lambda node: None) if cut["tokens"] == tokens - 1
        ]  # fmt: skip
        assert computed["prefill"]["computed_tokens"] == tokens - 1
        assert 0 < computed["prefill"]["engine_s"] <= computed["prefill"]["wall_s"]
        assert computed["restores"] == []
        usage = await once(lambda node: complete(node, prompt))
        assert usage["prompt_tokens_details"]["cached_tokens"] == tokens - 1
        both = {cut["cut"]: cut for cut in await once(lambda node: None)}[computed["cut"]]
        assert both["prefill"] == computed["prefill"]
        assert {one["tier"]: one["count"] for one in both["restores"]}["disk"] == 1
        assert SECRET.encode() not in (tmp_path / "data" / "economics.sqlite").read_bytes()

    harness.within(scenario())


@pytest.mark.slow
def test_a_cut_that_was_computed_and_then_brought_back_has_both_times_and_nothing_of_the_text(
    tmp_path,
):
    prompt = f"{SECRET}. {TEXT}"
    with harness.served(tmp_path / "data") as node:
        assert asked(node) == []
        tokens = complete(node, prompt)["prompt_tokens"]
        harness.until(lambda: asked(node), 20.0, 0.1)
        (computed,) = [cut for cut in asked(node) if cut["tokens"] == tokens - 1]
        assert computed["prefill"]["computed_tokens"] == tokens - 1
        assert 0 < computed["prefill"]["engine_s"] <= computed["prefill"]["wall_s"]
        assert computed["restores"] == []
        assert NOT_MEASURED in table(asked(node))
        harness.settled(node)
        node.kill()
    with harness.served(tmp_path / "data") as node:
        cached = complete(node, prompt)["prompt_tokens_details"]["cached_tokens"]
        assert cached == tokens - 1
        # Of the text that goes on from there only the end is computed.
        longer = complete(node, prompt + "And then the wind rose, and nobody slept. " * 4)
        deepest = longer["prompt_tokens"] - 1
        harness.until(lambda: any(cut["tokens"] == deepest for cut in asked(node)), 20.0, 0.1)
        cuts = json.loads(economics("--url", node.base_url, "--json").stdout)["cuts"]
        assert cuts == asked(node)
        (both,) = [cut for cut in cuts if cut["cut"] == computed["cut"]]
        assert both["prefill"] == computed["prefill"]
        assert both["state_bytes"] == computed["state_bytes"] > 0
        by_tier = {one["tier"]: one for one in both["restores"]}
        assert by_tier["disk"]["count"] == 1
        wall = both["prefill"]["wall_s"]
        for one in both["restores"]:
            assert one["of_prefill"] == pytest.approx(one["median_s"] / wall, rel=1e-3)
        (partly,) = [cut for cut in cuts if cut["tokens"] == deepest]
        assert partly["prefill"]["computed_tokens"] < partly["tokens"]
        assert partly["restores"] == []
        printed = economics("--url", node.base_url).stdout
        (line,) = [line for line in printed.splitlines() if partly["cut"][:12] in line]
        assert line.count(NOT_MEASURED) == 2
        raw = (node.data_dir / "economics.sqlite").read_bytes()
        for word in (SECRET.encode(), b"Zebedee", b"calm"):
            assert word not in raw
            assert word.decode() not in printed


def test_only_an_administrator_is_told(tmp_path):
    async def scenario():
        keys, (mine, _, local) = harness.two_tenants(tmp_path)
        async with harness.web_node(tmp_path / "data", api_key_file=keys) as web:
            url = f"{web.base_url}/kvpack/economics"
            refused = await asyncio.to_thread(harness.ask, url, **mine)
            answer = await asyncio.to_thread(harness.ask, url, **local)
            assert refused[0] == 403
            assert json.loads(answer[2]) == {"object": "kvpack.economics", "cuts": []}

    harness.within(scenario())


def test_the_book_is_bounded_and_outlives_its_process(tmp_path):
    book = Book(tmp_path / "book.sqlite")
    for number in range(CUTS_MAX + 3):
        name = number.to_bytes(16, "big")
        book.restored(name, number + 1, 10, Tier.DISK, 0.5)
    kept = b"\xff" * 16
    book.computed(kept, 100, 10, Prefill(0, 100, 2.0, 1.5))
    for number in range(RESTORES_MAX + 5):
        book.restored(kept, 100, 10, Tier.DISK, float(number))
    book.restored(kept, 100, 10, Tier.MEMORY, 0.25)
    book.restored(kept, 100, 10, Tier.MEMORY, 0.75)
    book.close()
    # Too late: lost, and no error.
    book.restored(kept, 100, 10, Tier.MEMORY, 50.0)
    costs = Book(tmp_path / "book.sqlite").read()
    assert len(costs) == CUTS_MAX
    assert (0).to_bytes(16, "big") not in {cost.cut_id for cost in costs}
    (cost,) = [cost for cost in costs if cost.cut_id == kept]
    disk, memory = cost.restores
    assert (disk.tier, len(disk.seconds), disk.seconds[-1]) == (Tier.DISK, 15, 19.0)
    assert (disk.median_s, cost.ratio(disk), cost.ratio(memory)) == (12.0, 6.0, 0.25)
    assert (tmp_path / "book.sqlite").stat().st_mode & 0o777 == 0o600


def test_a_book_that_cannot_be_written_costs_no_answer_and_is_named_when_it_is_asked(tmp_path):
    path = tmp_path / "book.sqlite"
    path.write_bytes(b"no database" * 500)
    book = Book(path)
    book.restored(b"x" * 16, 1, 1, Tier.DISK, 1.0)
    with pytest.raises(RecordsError, match=r"book\.sqlite"):
        book.read()


@pytest.mark.parametrize("first, computed", [(10, 90), (0, 90)])
def test_a_part_of_a_prefill_is_never_that_of_the_whole(tmp_path, first, computed):
    book = Book(tmp_path / "book.sqlite")
    book.computed(b"x" * 16, 100, 10, Prefill(first, computed, 2.0, 1.5))
    book.restored(b"x" * 16, 100, 10, Tier.DISK, 1.0)
    (cost,) = book.read()
    assert cost.whole_prefill is None
    assert cost.ratio(cost.restores[0]) is None


def test_a_wrong_place_is_one_clear_error():
    done = economics("--url", "ftp://x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvnode: error: --url 'ftp://x': expected http://HOST:PORT or https://HOST:PORT\n"
    )
    for url in ("http://", "http://a:b", "http://a/b", "http://u:p@a", "nothing"):
        with pytest.raises(UsageError):
            fetch(url, "")
    with pytest.raises(PeerUnavailableError, match="nobody answers"):
        fetch("http://127.0.0.1:9", "")


CUT = {"cut": "ab" * 16, "tokens": 9, "state_bytes": 1, "prefill": None, "restores": []}


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"[]", b"{}", b'{"cuts": [1]}', b"[" * 100_000,
        json.dumps({"cuts": [CUT | {"cut": "\x1b[2J"}]}).encode(),
        json.dumps({"cuts": [CUT | {"tokens": "9"}]}).encode(),
        json.dumps({"cuts": [CUT | {"state_bytes": float("nan")}]}).encode(),
        json.dumps({"cuts": [CUT | {"restores": [{"tier": "\x1b"}]}]}).encode(),
    ],
)  # fmt: skip
def test_what_is_no_node_is_refused_by_name(answer):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        with pytest.raises(PeerAnswerError, match="no node of this release"):
            fetch(f"http://127.0.0.1:{server.server_port}", "")
    finally:
        server.shutdown()
        server.server_close()


def test_a_table_has_a_line_for_each_tier():
    restores = [
        {"tier": "disk", "count": 3, "median_s": 0.5, "of_prefill": 0.25},
        {"tier": "memory", "count": 1, "median_s": 0.125, "of_prefill": None},
    ]
    cut = CUT | {"prefill": {"computed_tokens": 9, "wall_s": 2.0}, "restores": restores}
    head, first, second = (line.split() for line in table([cut]).splitlines())
    assert head == ["cut", "tokens", "bytes", "prefill", "s", "restore", "s", *head[7:]]
    assert first == ["abababababab", "9", "1", "2.000", "0.500", "disk", "3", "0.2500"]
    assert second == ["abababababab", "9", "1", "2.000", "0.125", "memory", "1", "-"]
