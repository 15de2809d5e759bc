"""Hybrids whose full layers rotate, and plain models, through packs and between two nodes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import ModelCase, greedy, run_calls, tokens, write_model
from models_support import ARCHES
from test_engine_replay import child_environment

from engine import Model
from kvpack.bundle import BundleReader, Header, read_snapshot, write_snapshot
from kvpack.errors import IdentityMismatchError, LayoutMismatchError
from kvpack.identity import require_same_identity
from kvpack.keys import Keyring, generate_key

W, TENANT = 8, "acme"
Load = Callable[[ModelCase], Model]


def packed(model: Model, position: int) -> tuple[bytes, Keyring, list[bytes]]:
    """A cut as a pack, the keys that open it, and the logits that follow it."""
    generation = model.new_generation()
    run_calls(generation, tokens(position), [position - 1, 1])
    key, sink = generate_key(TENANT), io.BytesIO()
    write_snapshot(
        sink,
        key,
        Header.of(model.identity(TENANT), key.epoch),
        generation.snapshot(tokens(position)),
        model.numerics(),
        generation.schedule,
    )
    return sink.getvalue(), Keyring([key]), [step.data for step in greedy(generation, 65, 2 * W)]


@pytest.mark.parametrize("position", [W - 1, 5 * W + 3, 300])
@pytest.mark.parametrize("arch", ARCHES)
def test_a_pack_continues_bit_for_bit(arch: str, position: int, load: Load) -> None:
    """Layers of two bases, of two kinds that both rotate, or of one kind: each in its chunks."""
    model = load(ModelCase(arch))
    pack, keys, expected = packed(model, position)
    reader = BundleReader(io.BytesIO(pack), keys)
    require_same_identity(model.identity(TENANT), reader.header.identity)
    snapshot = read_snapshot(reader)
    installer = model.installer(snapshot.position)
    for tile in snapshot.tiles:
        installer.scatter(tile)
    restored = installer.finish(reader.manifest.schedule)
    assert [step.data for step in greedy(restored, 65, 2 * W)] == expected


@pytest.mark.parametrize("arch", ARCHES)
def test_a_pack_of_another_architecture_is_refused_by_name(arch: str, load: Load) -> None:
    pack, keys, _ = packed(load(ModelCase(arch)), W + 1)
    identity = BundleReader(io.BytesIO(pack), keys).header.identity
    for other in set(ARCHES) - {arch}:
        with pytest.raises((IdentityMismatchError, LayoutMismatchError)) as caught:
            require_same_identity(load(ModelCase(other)).identity(TENANT), identity)
        assert caught.value.field == "weights_digest"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3", "gpt_oss", "olmo3", "llama"])
def test_a_session_moves_between_two_real_processes(arch: str, tmp_path: Path) -> None:
    """The demo with this model: a move, a twin that stayed, a pack, and a flipped byte."""
    folder = write_model(tmp_path / "model", ModelCase(arch, window=32, layers=6))
    script = "import sys; from node.cli import main; main(sys.argv[1:])"
    options = ["demo", "--model", str(folder), "--out", str(tmp_path / "out"), "--tokens", "700"]
    done = subprocess.run(
        [sys.executable, "-c", script, *options, "--json"],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] and (result["state"], result["continuation"]) == ("exact", "exact")
    assert result["replay"]["bitwise_equal_steps"] == result["replay"]["steps"] > 60
