"""A real Prometheus scrapes a real node and answers every question of the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import harness
import httpx2
from metrics_support import DEPLOY, program, samples

#: What Grafana puts in for its variables.
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "[1h]": "[10s]"}

SCRAPE_S = 0.25

WAYS = ("finished", "cancelled", "stalled", "failed")


def get(url: str, seconds: float = 10.0) -> str:
    with urllib.request.urlopen(url, timeout=seconds) as answer:  # noqa: S310 - our own address
        return answer.read().decode()


def expressions() -> list[str]:
    """Every ``expr`` of every dashboard, however deep."""
    boards = sorted((DEPLOY / "grafana").glob("*.json"))
    return [found for board in boards for found in asked_in(json.loads(board.read_text()))]


def asked_in(value) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (inner for name, inner in value.items() if name == "expr")
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from asked_in(inner)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def prometheus(folder, target: str):
    """A Prometheus that scrapes ``target`` and evaluates our rules; gives its address."""
    port = free_port()
    configuration = {
        "global": {"scrape_interval": f"{round(1000 * SCRAPE_S)}ms", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus" / "kvpack.rules.yml")],
        "scrape_configs": [{"job_name": "kvpack", "static_configs": [{"targets": [target]}]}],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"
    try:
        harness.until(lambda: reaches(f"{base}/-/ready"), seconds=30)
        yield base
    finally:
        process.terminate()
        process.wait(10)


def reaches(url: str) -> bool:
    try:
        get(url, 1.0)
    except OSError:
        return False
    return True


def ask(base: str, expression: str) -> dict:
    query = urllib.parse.urlencode({"query": expression})
    try:
        return json.loads(get(f"{base}/api/v1/query?{query}"))
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def test_a_real_prometheus_answers_every_question_of_the_dashboard(tmp_path):
    program("prometheus")
    questions = expressions()
    assert len(questions) > 30
    with harness.served(tmp_path / "data") as node:
        usages = [chat(node.base_url, "Call me Ishmael.")["usage"] for _ in range(2)]
        with contextlib.suppress(urllib.error.HTTPError):
            get(f"{node.base_url}/v1/models/other")
        with prometheus(tmp_path, node.base_url.removeprefix("http://")) as base:
            # Rates want some scrapes.
            harness.until(lambda: scrapes(base) >= 4, seconds=20)
            assert [one for one in questions if not is_answered(base, one)] == []
            assert value(base, 'kvpack_refusals_total{reason="model_not_found"}') == 1
            # The same numbers as in the usage blocks.
            for question, field in (
                ("sum(kvpack_prompt_tokens_total)", "prompt_tokens"),
                ("kvpack_generated_tokens_total", "completion_tokens"),
            ):
                assert value(base, question) == sum(usage[field] for usage in usages)
            rules = json.loads(get(f"{base}/api/v1/rules"))["data"]["groups"]
            states = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
            assert len(states) == 10
            assert set(states.values()) <= {"ok", "unknown"}


def is_answered(base: str, question: str) -> bool:
    """Whether Prometheus finds a result for ``question``, with Grafana's variables put in."""
    for variable, word in VARIABLES.items():
        question = question.replace(variable, word)
    answer = ask(base, question)
    return answer["status"] == "success" and bool(answer["data"]["result"])


def value(base: str, expression: str) -> float:
    (row,) = ask(base, expression)["data"]["result"]
    return float(row["value"][1])


def chat(base_url: str, text: str, max_tokens: int = 4) -> dict:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    request = urllib.request.Request(  # noqa: S310 - our own address
        f"{base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own address
        return json.load(answer)


def scrapes(base: str) -> int:
    result = ask(base, "count_over_time(kvpack_start_time_seconds[1m])")["data"]["result"]
    return int(result[0]["value"][1]) if result else 0


def test_counters_only_grow_while_answers_come_and_are_hung_up_on(tmp_path):
    """Scraped all the while; in the end they agree with each other and with the usage blocks."""

    async def grow():
        async with harness.web_node(tmp_path / "data") as web:
            scrape = web.node.entrance.door.desk.metrics.exposition
            seen = [samples(scrape().decode())]

            async def look():
                while True:
                    await asyncio.sleep(0.1)
                    seen.append(samples(scrape().decode()))

            looking = asyncio.create_task(look())
            async with httpx2.AsyncClient(base_url=web.base_url, timeout=60) as client:
                usages = [one async for one in talked(client)]
            await asyncio.sleep(0.3)
            looking.cancel()
            return usages, seen, samples(scrape().decode())

    usages, seen, last = harness.within(grow())
    counted = [name for name in last if name.partition("{")[0].endswith(("_total", "_bucket"))]
    for before, after in itertools.pairwise([*seen, last]):
        assert [name for name in counted if after[name] < before.get(name, 0.0)] == []
    ended = {way: last[f'kvpack_answers_total{{outcome="{way}"}}'] for way in WAYS}
    assert ended == {"finished": len(usages), "cancelled": 2, "stalled": 0, "failed": 0}
    assert sum(ended.values()) == last["kvpack_answers_submitted_total"]
    by_source = [n for name, n in last.items() if name.startswith("kvpack_prompt_tokens_total")]
    computed = last['kvpack_prompt_tokens_total{source="computed"}']
    assert sum(by_source) >= sum(usage["prompt_tokens"] for usage in usages)
    assert computed <= sum(by_source)
    hits = sum(n for name, n in last.items() if name.startswith("kvpack_cache_hits_total"))
    assert hits <= last["kvpack_cache_lookups_total"]
    assert last["kvpack_first_token_seconds_count"] >= len(usages)


async def talked(client):
    """Usage of whole answers; between them two streams whose client hangs up."""
    for number in range(4):
        body = {"messages": [{"role": "user", "content": f"Call me {number}."}], "max_tokens": 6}
        if number % 2:
            endless = body | {"stream": True, "max_tokens": 400}
            async with client.stream("POST", "/v1/chat/completions", json=endless) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
        yield (await client.post("/v1/chat/completions", json=body)).json()["usage"]


def test_no_request_fails_because_of_a_metric(tmp_path, model_dir, monkeypatch):
    """The counters throw, then the scrape does: callers get their answers all the same."""

    async def throw():
        async with harness.web_node(tmp_path / "data", model_dir) as web:
            desk = web.node.entrance.door.desk

            def broken(*_):
                raise ValueError("a metric that throws")

            monkeypatch.setattr(type(desk.recorder), "answer", broken)
            monkeypatch.setattr(type(desk.recorder), "refuse", broken)
            assert await fetch(web.base_url + "/v1/models") == 200
            assert await fetch(web.base_url + "/v1/models/other") == 404
            monkeypatch.setattr(desk.metrics, "_read", broken)
            assert await fetch(web.base_url + "/metrics") == 500
            assert await fetch(web.base_url + "/v1/models") == 200

    harness.within(throw())


async def fetch(url: str) -> int:
    """Status of one answer, from a thread: the node is in this loop."""

    def status() -> int:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(status)
