"""What a start imports: seconds of it that nobody notices until they are counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.transformers_import import from_last_mark, quick_scan
from node.config import child_environment

ROOT = Path(__file__).resolve().parents[2]

#: Nothing of it is needed to say what commands there are, or that an option is wrong.
NOT_FOR_A_COMMAND = (
    *("mlx", "mlx_lm", "numpy", "transformers", "tokenizers", "huggingface_hub", "jinja2"),
    *("grpc", "starlette", "uvicorn", "prometheus_client", "cryptography.x509", "node.server"),
)

#: Nothing of it is needed by a node that speaks HTTP alone, before its engine is loaded.
NOT_FOR_HTTP = (
    *("mlx", "mlx_lm", "numpy", "transformers", "tokenizers", "cryptography.x509"),
    *("grpc_health.v1.health", "grpc_reflection.v1alpha.reflection", "node.grpc_side"),
    *("node.session_service", "node.migration_service", "node.directory_service"),
    *("node.placement.wiring", "node.client", "node.relay.passing", "node.pair", "node.prove"),
)

_READ_TWICE = """
import collections, json, sys
opened = collections.Counter()
def hear(event, arguments):
    if event == "open" and "/transformers/models/" in str(arguments[0]):
        opened[arguments[0]] += 1
sys.addaudithook(hear)
import engine.mlxlm
source = {path: times for path, times in opened.items() if path.endswith(".py")}
print(json.dumps([len(source), sum(times > 1 for times in source.values())]))
"""


def _run(code: str) -> object:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=child_environment(ROOT),
        capture_output=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("imported", "unneeded"),
    [
        ("node.cli", NOT_FOR_A_COMMAND),
        ("node.cli, node.daemon, node.web_side, node.behind", NOT_FOR_HTTP),
    ],
)
def test_a_start_imports_nothing_that_it_may_not_need(
    imported: str, unneeded: tuple[str, ...]
) -> None:
    found = _run(
        f"import {imported}, json, sys; print(json.dumps([m for m in {unneeded!r} "
        "if m in sys.modules]))"
    )
    assert found == []


def test_no_file_of_transformers_is_read_twice_for_its_names() -> None:
    files, twice = _run(_READ_TWICE)  # type: ignore[misc]
    assert files > 1000
    # Those that are imported themselves may be among them.
    assert twice < 50, "transformers lists its names in another way: engine.transformers_import"


def test_the_quick_search_finds_the_same_names() -> None:
    from transformers.utils import import_utils

    asked: list[str] = []

    def names_in(text: str) -> list[str]:
        asked.append(text)
        return slow(text)

    slow = getattr(import_utils.fetch__all__, "__wrapped__", import_utils.fetch__all__)
    quick = from_last_mark(names_in)
    folder = Path(import_utils.__file__).parents[1] / "models"
    files = sorted(folder.glob("[a-d]*/*.py"))
    assert len(files) > 300
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert quick(text) == slow(text), path.name
    shorter = sum(map(len, asked)) / sum(path.stat().st_size for path in files)
    assert shorter < 0.2
    for text in ("", "x = 1", '__all__ = ["A"]', 'a\n__all__ = ["A"]\n__all__ = ["B"]\nb'):
        assert quick(text) == slow(text)


def test_an_import_of_another_thread_meets_every_finder():
    before, seen = sys.meta_path, list(sys.meta_path)
    with quick_scan():
        during, there = sys.meta_path, list(sys.meta_path)
        assert there[1:] == seen and before == seen
    assert sys.meta_path == seen and during == there
