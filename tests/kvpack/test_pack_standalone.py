"""kvpack stands alone: it loads no array library, no RPC and no HTTP, and opens nothing hidden."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[2] / "kvpack"
_FORBIDDEN = (
    "mlx",
    "mlx_lm",
    "grpc",
    "numpy",
    "torch",
    "transformers",
    "http",
    "socket",
    "asyncio",
)

_CHILD = """
import sys, pkgutil, importlib, kvpack
for module in pkgutil.walk_packages(kvpack.__path__, "kvpack."):
    if module.name != "kvpack.__main__":
        importlib.import_module(module.name)
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_importing_every_module_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], cwd=_PACKAGE.parent, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    loaded = set(done.stdout.split())
    assert "kvpack" in loaded
    assert loaded & set(_FORBIDDEN) == set()


def _sources() -> list[Path]:
    return [path for path in _PACKAGE.rglob("*.py") if "pb" not in path.parts]


def test_no_pickle_eval_assert_or_blind_except_in_the_format() -> None:
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            assert not isinstance(node, ast.Assert), where
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, where
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), where
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"pickle", "marshal", "shelve"}, where


def test_files_and_functions_stay_small() -> None:
    for path in _sources():
        text = path.read_text()
        assert text.count("\n") <= 400, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{path.name}: {node.name}"
