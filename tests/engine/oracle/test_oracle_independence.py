"""The oracle is a witness only while it shares nothing with what it judges."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import engine.oracle

SOURCES = sorted(Path(engine.oracle.__file__).parent.rglob("*.py"))
ALLOWED = {"engine.oracle", "kvpack", "numpy", "blake3"}


def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            names.add(node.module or "")
    return names


def test_it_imports_numpy_and_the_format_and_nothing_of_the_engine() -> None:
    assert len(SOURCES) > 15
    for path in SOURCES:
        for name in imported(path):
            root = name.split(".")[0]
            known = root in sys.stdlib_module_names or root in ALLOWED
            assert known or name.startswith("engine.oracle"), (path.name, name)


def test_it_opens_no_file() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            assert not (isinstance(called, ast.Name) and called.id == "open"), path.name
        assert not imported(path) & {"pathlib", "os", "io", "mmap"}, path.name


def test_importing_it_loads_neither_mlx_nor_mlx_lm() -> None:
    program = (
        "import sys, engine.oracle\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"
