"""A real Prometheus scrapes a real node and answers every question of the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import harness
from metrics_support import DEPLOY, program, samples

#: What Grafana puts in for its variables.
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "[1h]": "[10s]"}

SCRAPE_S = 0.25


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
        for path in ("/v1/models", "/v1/models/other"):
            with contextlib.suppress(urllib.error.HTTPError):
                get(node.base_url + path)
        with prometheus(tmp_path, node.base_url.removeprefix("http://")) as base:
            # Rates want some scrapes.
            harness.until(lambda: scrapes(base) >= 4, seconds=20)
            unanswered = {}
            for question in questions:
                asked = question
                for variable, value in VARIABLES.items():
                    asked = asked.replace(variable, value)
                answer = ask(base, asked)
                if answer["status"] != "success" or not answer["data"]["result"]:
                    unanswered[question] = answer
            assert unanswered == {}
            (refused,) = ask(base, 'kvpack_refusals_total{reason="model_not_found"}')["data"][
                "result"
            ]
            assert refused["value"][1] == "1"
            rules = json.loads(get(f"{base}/api/v1/rules"))["data"]["groups"]
            states = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
            assert len(states) == 10
            assert set(states.values()) <= {"ok", "unknown"}


def scrapes(base: str) -> int:
    result = ask(base, "count_over_time(kvpack_start_time_seconds[1m])")["data"]["result"]
    return int(result[0]["value"][1]) if result else 0


def test_counters_of_a_real_node_only_grow(tmp_path, model_dir):
    async def grow():
        async with harness.web_node(tmp_path / "data", model_dir) as web:
            metrics = web.node.entrance.door.desk.metrics
            before = samples(metrics.exposition().decode())
            await fetch(web.base_url + "/v1/models")
            after = samples(metrics.exposition().decode())
            grown = 'kvpack_http_answers_total{door="other",status="2xx"}'
            assert after[grown] == before[grown] + 1
            counted = [name for name in before if name.partition("{")[0].endswith("_total")]
            assert [name for name in counted if after[name] < before[name]] == []

    harness.within(grow())


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
