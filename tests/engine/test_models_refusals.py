"""What cannot be loaded, and the one line that says so: field, expected, found."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_support import ModelCase, write_model
from mlx.utils import tree_flatten
from models_support import NULL, edited

import engine
from engine import ModelFolderError, UnsupportedCacheError, mlxlm
from engine.architectures import ARCHITECTURES

S, F = "sliding_attention", "full_attention"


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelFolderError) as caught:
        engine.load_model(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        # Lists and patterns that mlx-lm would cut short, ignore or fall over.
        ("gemma3", {"layer_types": [S] * 4}, f"layer_types[2]: expected {F}, as mlx-lm computes"),
        ("gemma3_text", {"layer_types": [S, S, F]}, "layer_types: expected 4 entries, as num_hid"),
        (
            "gemma3_text",
            {"layer_types": [S, S, F, "chunked_attention"]},
            "layer_types[3]: expected",
        ),
        ("gemma3_text", {"sliding_window_pattern": 9}, "num_hidden_layers: expected at least 9"),
        ("gemma3_text", {"num_hidden_layers": 3}, "num_hidden_layers: expected 4, as the weights"),
        ("cohere2", {"layer_types": [F, S, S, S]}, f"layer_types[0]: expected {S}, as mlx-lm"),
        ("exaone4", {"sliding_window_pattern": "LG"}, f"layer_types[1]: expected {F}, as mlx-lm"),
        (
            "gpt_oss",
            {"layer_types": [S] * 4},
            f"layer_types: expected at least one {F}, found none",
        ),
        ("olmo3", {"layer_types": [F] * 4}, f"layer_types: expected at least one {S}, found none"),
        ("llama", {"layer_types": [S] * 4}, f"layer_types: expected at least one {F}, found none"),
        ("llama", {"layer_types": [S, S, S, F]}, "layers[0].window: expected a number, found None"),
        ("llama", {"layer_types": "full"}, "layer_types: expected a list, found str"),
        ("gemma3", {"sliding_window": -8}, "sliding_window: expected a positive integer, found -8"),
        # Math that mlx-lm would leave out.
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected none"),
        ("muse_glimmer", {"hidden_activation": "gelu"}, "hidden_activation: expected none or silu"),
        ("llama", {"hidden_act": "relu"}, "hidden_act: expected none or silu (mlx-lm computes"),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: expected 1.0, as layer 0",
        ),
        (
            "cohere2",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling: expec",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: expected none or 7.0"),
        # RoPE by more than the position, or in a place where mlx-lm does not look.
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "found dynamic"),
        ("olmo3", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: expected"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 5e5}},
            "rope_theta: expected 100000.0, as mlx",
        ),
        ("llama", {"rope_parameters": [1]}, "rope_parameters: expected an object, found list"),
        ("llama", {"rope_theta": "big"}, "rope_theta: expected a number, found big"),
        (
            "olmo3",
            {"rope_parameters": {S: {"rope_theta": 1e4}, F: {"rope_type": "yarn"}}},
            "rope_parameters of layer 0.rope_theta: expected 500000.0, as mlx-lm computes it",
        ),
        (
            "gpt_oss",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters of layer 0.rope_type: expected what mlx-lm computes (yarn ",
        ),
        ("muse_glimmer", {"layer_rope_theta": [5e5, 1e4, 5e5, 0]}, "layer_rope_theta[1]: expected"),
        ("muse_glimmer", {"layer_rope_theta": [5e5] * 3 + [0, 0]}, "expected 4 entries, found 5"),
        # Shapes and element types.
        ("gemma3", {"num_attention_heads": 8}, "num_attention_heads: expected 128 rows of q_proj"),
        ("gpt_oss", {"num_key_value_heads": 4}, "num_key_value_heads: expected 64 rows of k_proj"),
        (
            "olmo3",
            {"head_dim": 64},
            "head_dim: expected 32, as the rows of all projections in laye",
        ),
        ("llama", {"hidden_size": 64}, "hidden_size: expected 128, as the embedding has, found 64"),
        ("llama", {"vocab_size": 321}, "vocab_size: expected 320, as the embedding has, found 321"),
        ("llama", {"intermediate_size": 255}, "llama: Expected shape"),
        ("gpt_oss", {"num_local_experts": 8}, "gpt_oss: Expected shape"),
        (
            "llama",
            {"attention_bias": True},
            "llama: Missing 16 parameters: model.layers.0.self_attn",
        ),
        ("llama", {"torch_dtype": "bfloat16"}, "torch_dtype: expected float16, as model.layers.0"),
        (
            "llama",
            {"max_position_embeddings": None},
            "max_position_embeddings: expected a positive",
        ),
        ("llama", {"text_config": 5}, "text_config: expected an object, found int"),
        ("llama", {"num_hidden_layers": "4"}, "num_hidden_layers: expected a positive integer"),
    ],
)
def test_a_config_is_refused_by_its_field(
    arch: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert message in refusal(edited(tmp_path / "m", ModelCase(arch), changes))


def test_a_dtype_that_is_asked_for_outweighs_the_config_s_word(tmp_path: Path) -> None:
    folder = edited(tmp_path / "m", ModelCase("llama"), {"torch_dtype": "bfloat16"})
    assert "load with dtype=" in refusal(folder)
    assert engine.load_model(folder, dtype="float16").layout.encoding.value == "f16le"


def test_a_default_pattern_that_leaves_out_the_last_layer(tmp_path: Path) -> None:
    """mlx-lm's default for GPT-OSS is pairs of layers: with five it would drop one in silence."""
    case = ModelCase("gpt_oss", layers=5)
    folder = edited(tmp_path / "m", case, {"layer_types": None})
    assert "num_hidden_layers: expected 4, as the network has, found 5" in refusal(folder)


def test_tokenizers_that_the_libraries_cannot_read(folder: Path) -> None:
    """One library raises a bare Exception, another divides by zero; both are the folder's fault."""
    content = json.loads((folder / "tokenizer.json").read_text())
    for model in ({"type": "NoSuchModel"}, {"type": "BPE", "vocab": 5}, None):
        (folder / "tokenizer.json").write_text(json.dumps({**content, "model": model}))
        assert ": tokenizer: " in refusal(folder)


def test_a_config_on_which_the_tokenizer_s_loader_fails(tmp_path: Path) -> None:
    nulls = {"sliding_window": NULL, "sliding_window_pattern": NULL, "layer_types": None}
    message = refusal(edited(tmp_path / "m", ModelCase("exaone4"), nulls))
    assert "tokenizer: integer modulo by zero" in message
    message = refusal(edited(tmp_path / "n", ModelCase("llama"), {"initializer_range": "wide"}))
    assert "tokenizer: " in message and "initializer_range" in message


# --- weight files


def rewrite(folder: Path, change: Callable[[dict[str, Any], bytearray], None]) -> Path:
    """The folder with its weight file's header and data changed, lengths kept consistent."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:end]), bytearray(content[end:])
    change(header, data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", ModelCase("llama"))


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def without_layer_1(header: dict[str, Any], data: bytearray) -> None:
    names = [name for name in header if ".layers.1." in name]
    first = min(header[name]["data_offsets"][0] for name in names)
    length = max(header[name]["data_offsets"][1] for name in names) - first
    for name in names:
        del header[name]
    del data[first : first + length]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] > first:
            entry["data_offsets"] = [offset - length for offset in entry["data_offsets"]]


def as_integers(header: dict[str, Any], _: bytearray) -> None:
    header[Q_PROJ]["dtype"] = "I16"


def of_unknown_type(header: dict[str, Any], _: bytearray) -> None:
    header[Q_PROJ]["dtype"] = "F12"


def a_row_too_many(header: dict[str, Any], _: bytearray) -> None:
    header[Q_PROJ]["shape"][0] += 1


def with_negative_size(header: dict[str, Any], _: bytearray) -> None:
    header[Q_PROJ]["shape"] = [-128, -128]


def overlapping(header: dict[str, Any], _: bytearray) -> None:
    other = header["model.layers.2.self_attn.q_proj.weight"]
    header[Q_PROJ]["data_offsets"] = other["data_offsets"]


def with_more_data(_: dict[str, Any], data: bytearray) -> None:
    data.append(0)


def with_less_data(_: dict[str, Any], data: bytearray) -> None:
    del data[-1:]


def without_offsets(header: dict[str, Any], _: bytearray) -> None:
    del header[Q_PROJ]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_layer_1, "layers[1]: expected weights, found none"),
        (as_integers, f"{Q_PROJ}: dtype: expected F32 or F16 or BF16, found I16"),
        (of_unknown_type, f"{Q_PROJ}: dtype: expected a known one, found F12"),
        (a_row_too_many, f"{Q_PROJ}: expected 33024 bytes, found 32768"),
        (with_negative_size, f"{Q_PROJ}: not a tensor's header"),
        (without_offsets, f"{Q_PROJ}: not a tensor's header"),
        (overlapping, "expected at byte"),
        (with_more_data, "bytes of tensors, found"),
        (with_less_data, "bytes of tensors, found"),
    ],
)
def test_a_weight_file_is_refused_by_what_is_wrong(
    folder: Path, change: Callable[[dict[str, Any], bytearray], None], message: str
) -> None:
    assert message in refusal(rewrite(folder, change))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header: expected within 0 bytes"),
        (b"\xff" * 8 + b"{}", "header: expected within 10 bytes, found 18446744073709551615"),
        ((2).to_bytes(8, "little") + b"[]", "header: not a JSON object"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "header: not valid JSON"),
    ],
)
def test_a_damaged_header_is_named(folder: Path, content: bytes, message: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert f"model.safetensors: {message}" in refusal(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    """mlx-lm would take whichever file the directory happens to list last."""
    (folder / "model-old.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "expected in one file, found in model-old.safetensors and model.s" in refusal(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    files = ["model.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {f"tensor{number}": name for number, name in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{files[1]}, named by model.safetensors.index.json, is missing" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "weight_map: expected an object" in refusal(folder)


# --- caches that planes cannot stand in for

LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 8,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 512,
        "num_attention_heads": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1e4,
        "use_qk_norm": True,
        "vocab_size": 320,
    },
}
MAMBA = {
    "model_type": "mamba",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 8,
    "num_hidden_layers": 4,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
}


def foreign(folder: Path, config: dict[str, Any]) -> Path:
    """A model of mlx-lm's that this engine does not know, as a folder."""
    write_model(folder, ModelCase("llama"))
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    network = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "kind"),
    [(LLAMA4, "ChunkedKVCache"), (MAMBA, "ArraysCache")],
    ids=["llama4", "mamba"],
)
def test_chunked_and_recurrent_caches_are_refused_by_name(
    config: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UnsupportedCacheError, match=f"cache kind {kind} is not supported"
    ) as caught:
        engine.load_model(foreign(tmp_path / "m", config))
    assert (caught.value.layer, caught.value.kind) == (0, kind)


def test_an_unknown_model_with_ordinary_caches_is_refused_by_its_type(tmp_path: Path) -> None:
    message = refusal(foreign(tmp_path / "m", QWEN2))
    assert f"model_type: expected one of {', '.join(sorted(ARCHITECTURES))}" in message
    assert "found 'qwen2'" in message


@pytest.mark.parametrize(
    "model_type", ["no_such_model", "..utils", "llama.x", "", 7, None, ["llama"]]
)
def test_model_types_that_nobody_knows(folder: Path, model_type: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    message = refusal(folder)
    assert "model_type: expected one of afmoe, " in message
    assert message.endswith(f"found {model_type!r}")


def test_quantised_and_prefix_keeping_caches_are_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm makes these only on request; a model that made them itself would be refused."""
    from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

    cases = {
        "QuantizedKVCache": QuantizedKVCache(),
        "RotatingKVCache with keep=4": RotatingKVCache(8, keep=4),
        "CacheList": CacheList(KVCache()),
    }
    for kind, bad in cases.items():
        wanted = [KVCache(), KVCache(), bad, KVCache()]
        monkeypatch.setattr(mlxlm, "make_prompt_cache", lambda _, caches=wanted: caches)
        with pytest.raises(UnsupportedCacheError) as caught:
            engine.load_model(folder)
        assert (caught.value.layer, caught.value.kind) == (2, kind)


def test_a_model_that_masks_with_another_window_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    folder = write_model(tmp_path / "m", ModelCase("olmo3"))
    wider = [*[RotatingKVCache(9)] * 3, KVCache()]
    monkeypatch.setattr(mlxlm, "make_prompt_cache", lambda _: wider)
    assert "sliding_window: expected 9, as layer 0 has, found 8" in refusal(folder)
    monkeypatch.setattr(mlxlm.config_checks, "require_windows", lambda *_: None)
    assert "layers[0]: window: expected 9, as its cache has, found a mask of 8" in refusal(folder)
