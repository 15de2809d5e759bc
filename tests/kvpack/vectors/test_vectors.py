"""Every vector, through every way to read, in kvpack and in the second reader: one verdict."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from vector_support import (
    FOLDER,
    fold,
    keyring,
    kvpack_checked,
    kvpack_forwards,
    kvpack_from_footer,
    kvpack_piped,
    load,
    names,
    reference_forwards,
    reference_from_footer,
    signed_verdicts,
)

from kvpack.bundle import Depth
from kvpack.keys import EpochKey, write_key_file
from tests.reference.verdict import Refused
from tests.vector_kit.cases import VECTORS

_TESTS = Path(__file__).parents[2]
_EXITS = {"ok": 0, "malformed": 10, "over_limit": 10, "unsupported_version": 10,
          "not_authentic": 11, "unknown_key": 11, "identity_mismatch": 12, "layout_mismatch": 12,
          "incomplete": 14}  # fmt: skip
_NOTHING = blake3(b"").hexdigest()


def test_the_kit_writes_the_committed_bytes() -> None:
    written = {vector.name: vector.encode() for vector in VECTORS}
    assert len(written) == len(VECTORS), "two vectors of one name"
    assert sorted(written) == names()
    changed = [name for name, data in written.items() if (FOLDER / name).read_bytes() != data]
    assert changed == []


def test_no_frozen_vector_is_ever_edited() -> None:
    lines = (FOLDER.parent / "v1.frozen").read_text().splitlines()
    frozen = dict(line.split("  ")[::-1] for line in lines)
    assert len(frozen) == len(lines) > 300
    found = {name: blake3((FOLDER / name).read_bytes()).hexdigest() for name in frozen}
    assert found == frozen


@pytest.mark.parametrize("name", [name for name in names() if not load(name).signer])
def test_both_readers_agree_with_the_vector(name: str) -> None:
    vector, keys = load(name), keyring(load(name).roots)
    reason, stage = vector.expect

    second = reference_from_footer(vector.data, vector.roots)
    assert (second.reason, second.stage) == (reason, stage)
    assert second.handed == vector.fields["released"]
    piped = reference_forwards(vector.data, vector.roots)
    assert (piped.reason, piped.stage) == (reason, stage)

    ours = kvpack_from_footer(vector.data, keys)
    assert ours.folded == fold(reason), ours
    assert ours.handed == vector.fields["released"]
    for verdict in (ours, kvpack_checked(vector.data, keys)):
        assert (verdict.folded, verdict.exit_code) == (fold(reason), _EXITS[reason]), verdict
    ours = kvpack_piped(vector.data, keys)
    assert (ours.folded, ours.exit_code) == (fold(reason), _EXITS[reason]), ours
    kept = kvpack_forwards(vector.data, keys)
    if reason in ("ok", "incomplete"):
        assert (kept.reason, kept.handed) == ("ok", vector.fields["released"])
    else:
        assert (kept.folded, kept.handed) == (fold(reason), _NOTHING)


@pytest.mark.parametrize("name", [name for name in names() if load(name).signer])
def test_both_readers_agree_without_a_root(name: str) -> None:
    vector = load(name)
    ours, second = signed_verdicts(vector.data, vector.signer)
    assert (second.reason, second.stage) == vector.expect
    assert (ours.folded, ours.exit_code) == (fold(second.reason), _EXITS[second.reason]), ours


def test_a_false_content_id_is_found_by_who_looks() -> None:
    vector = load("good-content-id-untrue")
    verdicts = [
        reference_forwards(vector.data, vector.roots, deep=True),
        kvpack_checked(vector.data, keyring(vector.roots), Depth.DEEP),
        kvpack_piped(vector.data, keyring(vector.roots), Depth.DEEP),
    ]
    assert [verdict.reason for verdict in verdicts] == ["not_authentic"] * 3
    assert reference_forwards(load("good-plain").data, vector.roots, deep=True).reason == "ok"


@pytest.mark.parametrize(
    "name", ["good-plain", "header-version-2", "chunk-swapped", "gate-12-full-gap", "delta-alone"]
)
def test_the_commands_agree(name: str, tmp_path: Path) -> None:
    vector = load(name)
    (place, root), path = next(iter(vector.roots.items())), tmp_path / "pack.kvpack"
    path.write_bytes(vector.data)
    write_key_file(tmp_path / "my.key", EpochKey(*place, root))
    key = ["--key", str(tmp_path / "my.key")]
    commands = [["kvpack", "verify", *key, "-"], ["kvpack", "verify", *key, str(path)]]
    commands.append(["tests.reference.verify", *key, str(path)])
    codes = [
        subprocess.run(
            [sys.executable, "-m", *command], cwd=_TESTS.parent, input=vector.data,
            capture_output=True, timeout=60, check=False,
        ).returncode
        for command in commands
    ]  # fmt: skip
    assert codes == [_EXITS[vector.expect[0]]] * 3


@pytest.mark.parametrize(
    ("folder", "allowed"), [("reference", {"reference"}), ("vector_kit", {"vector_kit"})]
)
def test_the_second_reader_and_the_kit_stand_alone(folder: str, allowed: set[str]) -> None:
    roots = {"blake3", "cryptography", "zstandard"} | set(sys.stdlib_module_names)
    for path in (_TESTS / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in found:
                first, *rest = module.split(".")
                own = first == "tests" and rest[:1] and rest[0] in allowed
                assert own or first in roots, f"{path.name} imports {module}"


def test_every_reason_of_the_specification_has_a_vector() -> None:
    assert {load(name).expect[0] for name in names()} == set(_EXITS)
    assert Refused("malformed", "x", "y").exit_code == 10
