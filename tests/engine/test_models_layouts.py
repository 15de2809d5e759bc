"""The layout of each architecture, layer by layer: kinds, windows, and RoPE as it is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from engine_support import ModelCase
from models_support import ARCHES, edited, fields_of, network_of

import engine
from engine import Model
from engine.architectures import ARCHITECTURES
from engine.canonical import f64_bits
from engine.oracle import build_oracle, decode_safetensors
from engine.oracle.rope import Rope
from kvpack.errors import IdentityMismatchError, LayoutMismatchError
from kvpack.identity import Identity, require_same_identity
from kvpack.layout import Encoding, LayerKind

Load = Callable[[ModelCase], Model]
S, F = LayerKind.SWA, LayerKind.FULL
W, FAR = 8, 37

KINDS = {
    "gemma3": [S, S, F, S],
    "gemma3_text": [S, S, F, S],
    "gpt_oss": [S, F, S, F],
    "olmo3": [S, S, S, F],
    "llama": [F, F, F, F],
}
#: Base frequency and scaling of sliding layers and of full ones.
ROPES = {
    "gemma3": ((10_000.0, "none"), (1_000_000.0, "linear")),
    "gemma3_text": ((10_000.0, "none"), (1_000_000.0, "linear")),
    "gpt_oss": ((150_000.0, "yarn"), (150_000.0, "yarn")),
    "olmo3": ((500_000.0, "none"), (500_000.0, "yarn")),
    "llama": (None, (100_000.0, "none")),
}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FIRST_CLASS = ("muse_glimmer", "cohere2", "exaone4", "afmoe")


def test_every_loadable_architecture_has_a_tiny_model() -> None:
    assert set(ARCHITECTURES) == set(engine.ARCHITECTURES) == {*ARCHES, *FIRST_CLASS}


def test_the_command_offers_every_architecture() -> None:
    from node.cli import main

    shown = CliRunner().invoke(main, ["model", "tiny", "--help"], terminal_width=200).output
    assert all(arch in shown.replace(",", " ").split() for arch in ARCHITECTURES)


@pytest.mark.parametrize("arch", ARCHES)
def test_kinds_windows_and_rope_of_every_layer(arch: str, load: Load) -> None:
    layout = load(ModelCase(arch)).layout
    assert [layer.kind for layer in layout.layers] == KINDS[arch]
    assert [layer.window_tokens for layer in layout.layers] == [
        W if kind is S else None for kind in KINDS[arch]
    ]
    for layer in layout.layers:
        theta, scaling = ROPES[arch][layer.kind is F]
        assert (layer.rope.theta_bits, layer.rope.dims) == (f64_bits(theta), 32)
        assert layer.rope.scaling.split()[0] == scaling and not layer.rope.interleaved
        assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (2, 32, 32)
    assert layout.encoding is (Encoding.F32LE if arch == "gpt_oss" else Encoding.F16LE)


class Recorder:
    """A cache that stands at a position and keeps nothing but the keys that it was given."""

    def __init__(self, offset: int) -> None:
        self.offset, self.keys = offset, None

    def make_mask(self, *_: object, **__: object) -> None:
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = keys
        return keys, values


def keys_at(model: Model, position: int) -> list[np.ndarray]:
    """Keys ``[1, kv_heads, dim]`` of each layer for one token that sees only itself."""
    caches = [Recorder(position) for _ in model.layout.layers]
    mx.eval(network_of(model)(mx.array([[66]]), cache=caches))
    return [np.array(cache.keys.astype(mx.float32))[0, :, 0][None] for cache in caches]


@pytest.mark.parametrize("arch", engine.ARCHITECTURES)
def test_keys_are_rotated_as_the_layout_says(
    arch: str, load: Load, model_folder: Callable[[ModelCase], Path]
) -> None:
    """The same token at two positions: its keys differ by the stated rotation, or not at all.

    A single token attends to itself alone, so its hidden states do not depend on its position.
    """
    case = ModelCase(arch)
    model, folder = load(case), model_folder(case)
    tensors = decode_safetensors((folder / "model.safetensors").read_bytes())
    oracle = build_oracle(json.loads((folder / "config.json").read_text()), tensors)
    near, far = keys_at(model, 0), keys_at(model, FAR)
    for index, layer in enumerate(model.layout.layers):
        if layer.rope is None:
            assert np.allclose(near[index], far[index], atol=0.02), index
            continue
        rope = oracle.decoder.blocks[index].attention.rope
        # At position 0 nothing is turned, but YaRN's factor is in the keys already.
        turned = rope(near[index] / np.float32(rope.amplitude), FAR)
        assert np.allclose(turned, far[index], atol=0.02), index
        assert not np.allclose(near[index], far[index], atol=0.2), index
        assert not np.allclose(other_base(rope)(near[index], FAR), far[index], atol=0.02), index


def other_base(rope: Rope) -> Rope:
    """The same rotation with a base a tenth larger."""
    frequencies = rope.frequencies * 1.1 ** -(np.arange(0, rope.dims, 2) / rope.dims)
    return Rope(rope.theta * 1.1, frequencies, rope.interleaved, rope.amplitude, rope.scaling)


@pytest.mark.parametrize("arch", ["gemma3", "gemma3_text"])
def test_a_context_length_that_gemma_configs_leave_out(arch: str, tmp_path: Path) -> None:
    folder = edited(tmp_path / "m", ModelCase(arch), {"max_position_embeddings": None})
    assert engine.load_model(folder).layout.max_context_tokens == 131_072


def in_newer_form(arch: str, fields: dict[str, object]) -> dict[str, object]:
    """The changes that move RoPE into ``rope_parameters``, as newer configs have it."""
    older = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    full = {"rope_type": "default", **(fields.get("rope_scaling") or {})}
    full["rope_theta"] = fields["rope_theta"]
    local = fields.get("rope_local_base_freq", fields["rope_theta"])
    sliding = {"rope_type": "default", "rope_theta": local}
    nested = {"full_attention": full, "sliding_attention": sliding}
    newer = nested if arch.startswith(("gemma3", "olmo3")) else full
    return {**{name: None for name in older if name in fields}, "rope_parameters": newer}


@pytest.mark.parametrize("arch", engine.ARCHITECTURES)
def test_rope_parameters_load_as_the_older_fields_do(
    arch: str, tmp_path: Path, load: Load, model_folder: Callable[[ModelCase], Path]
) -> None:
    """mlx-lm alone would take its default base here, without a word."""
    case = ModelCase(arch)
    changes = in_newer_form(arch, fields_of(model_folder(case)))
    moved, model = engine.load_model(edited(tmp_path / "m", case, changes)), load(case)
    for ours, theirs in zip(model.layout.layers, moved.layout.layers, strict=True):
        if ours.rope is not None:
            assert ours.rope.theta_bits == theirs.rope.theta_bits
            # A rule's text is a digest of its fields, which now include the base.
            assert ours.rope.scaling.split()[0] == theirs.rope.scaling.split()[0]
    runs = []
    for one in (model, moved):
        generation = one.new_generation()
        generation.prefill([5, 80, 200, 7, 31, 5, 80, 11, 12, 13])
        runs.append(generation.step(66).data)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("arch", "changes", "field"),
    [
        ("gemma3_text", {"rope_local_base_freq": 20_000.0}, "layers[0].rope"),
        ("gemma3_text", {"rope_theta": 500_000.0}, "layers[2].rope"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "layers[2].rope"),
        ("gemma3_text", {"sliding_window_pattern": 2}, "layers[1].kind"),
        ("gemma3_text", {"sliding_window": 9}, "layers[0].window_tokens"),
        ("gemma3", {"query_pre_attn_scalar": 64}, "constants[query_pre_attn_scalar]"),
        ("gemma3", {"rope_local_base_freq": 20_000.0}, "layers[0].rope"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layers[0].kind"),
        ("gpt_oss", {"num_experts_per_tok": 1}, "constants[num_experts_per_tok]"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "layers[0].rope"),
        ("gpt_oss", {"max_position_embeddings": 4096}, "max_context_tokens"),
        ("olmo3", {"rope_theta": 10_000.0}, "layers[0].rope"),
        ("olmo3", {"rope_scaling": None}, "layers[3].rope"),
        ("olmo3", {"rms_norm_eps": 1e-5}, "constants[rms_norm_eps]"),
        ("llama", {"rope_theta": 10_000.0}, "layers[0].rope"),
        ("llama", {"rope_traditional": True}, "layers[0].rope"),
        ("llama", {"rope_scaling": LLAMA3}, "layers[0].rope"),
        (
            "llama",
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": W},
            "layers[0].kind",
        ),
    ],
)
def test_one_changed_setting_is_another_identity(
    arch: str, changes: dict[str, object], field: str, tmp_path: Path, load: Load
) -> None:
    case = ModelCase(arch)
    theirs = engine.load_model(edited(tmp_path / "m", case, changes)).identity("acme")
    assert first_difference(load(case), theirs) == field


@pytest.mark.parametrize("arch", ARCHES)
def test_other_weights_are_another_identity(arch: str, load: Load) -> None:
    theirs = load(ModelCase(arch, seed=8)).identity("acme")
    assert first_difference(load(ModelCase(arch)), theirs) == "weights_digest"


def test_nesting_alone_is_another_identity_by_its_weights(load: Load) -> None:
    """The same math in another file is not known to be the same: digests are over files."""
    theirs = load(ModelCase("gemma3")).identity("acme")
    assert first_difference(load(ModelCase("gemma3_text")), theirs) == "weights_digest"


def first_difference(model: Model, theirs: Identity) -> str:
    with pytest.raises((IdentityMismatchError, LayoutMismatchError)) as caught:
        require_same_identity(model.identity("acme"), theirs)
    return caught.value.field


def test_the_documentation_names_every_architecture_and_refusal() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    table = [line for line in page.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in line.split("|")[1].replace("`", "").split(", ")}
    assert {name.strip() for name in named} - {"model_type"} == set(ARCHITECTURES)
    assert str(engine.UnsupportedCacheError(0, "ChunkedKVCache")) in page
