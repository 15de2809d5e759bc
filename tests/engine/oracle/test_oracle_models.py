"""Building a model: every spelling of its weights, and every refusal by name."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from oracle_cases import ARCHITECTURES, Case, make_case, token_ids

from engine.oracle import Dialect, OracleModelError, build_oracle
from kvpack.errors import LimitError

Tensors = dict[str, np.ndarray]


def logits(config: dict[str, Any], tensors: Tensors, dialect: Dialect = Dialect.MLX_LM) -> Any:
    return build_oracle(config, tensors, dialect).new_session().append(token_ids(12))


def refused(config: dict[str, Any], tensors: Tensors) -> str:
    with pytest.raises(OracleModelError) as caught:
        build_oracle(config, tensors)
    return caught.value.field


def renamed(tensors: Tensors, before: str, after: str) -> Tensors:
    return {name.replace(before, after, 1): value for name, value in tensors.items()}


# --- spellings of one model


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
    ],
)
def test_a_text_tower_inside_a_multimodal_model_is_the_same_model(text: str, head: str) -> None:
    case = make_case("muse_glimmer", 8)
    nested = renamed(renamed(case.tensors, "model.", text), "lm_head.", head)
    nested["model.vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    nested["vision_adapter.fc1.weight"] = np.zeros((2, 2), np.float32)
    outer = {"model_type": "something_else", "hidden_size": 5}
    config = {**outer, "text_config": {**case.config}}
    assert np.array_equal(logits(config, nested), logits(case.config, case.tensors))


def test_experts_one_by_one_are_the_same_model() -> None:
    case = make_case("afmoe", 8)
    single: Tensors = {}
    for name, value in case.tensors.items():
        if ".mlp.experts." in name:
            for index, expert in enumerate(value):
                single[name.replace(".experts.", f".experts.{index}.")] = expert
        else:
            single[name] = value
    assert len(single) > len(case.tensors)
    assert np.array_equal(logits(case.config, single), logits(case.config, case.tensors))
    del single["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert refused(case.config, single) == "model.layers.1.mlp.experts.up_proj.weight"


def test_interleaved_experts_are_the_same_model() -> None:
    """GPT-OSS as published: gate and up column by column, inputs first."""
    case = make_case("gpt_oss", 8)
    published = {n: v for n, v in case.tensors.items() if ".experts." not in n}
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            case.tensors[f"{stem}{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        biases = [case.tensors[f"{stem}{part}_proj.bias"] for part in ("gate", "up", "down")]
        mixed = np.stack([gate, up], axis=2).reshape(len(gate), -1, gate.shape[2])
        published[f"{stem}gate_up_proj"] = mixed.swapaxes(1, 2)
        published[f"{stem}gate_up_proj_bias"] = np.stack(biases[:2], axis=2).reshape(len(gate), -1)
        published[f"{stem}down_proj"] = down.swapaxes(1, 2)
        published[f"{stem}down_proj_bias"] = biases[2]
    assert np.array_equal(logits(case.config, published), logits(case.config, case.tensors))


def test_a_tied_model_may_repeat_its_head() -> None:
    case = make_case("llama", 8)
    repeated = {**case.tensors, "lm_head.weight": np.zeros((97, 48), np.float32)}
    repeated["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    assert np.array_equal(logits(case.config, repeated), logits(case.config, case.tensors))


@pytest.mark.parametrize("architecture", ["muse_glimmer", "cohere2", "olmo3", "gemma3_text"])
def test_rope_parameters_say_the_same_as_the_older_fields(architecture: str) -> None:
    case = make_case(architecture, 8)
    older = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    newer = {name: value for name, value in case.config.items() if name not in older}
    full = {"rope_theta": case.config["rope_theta"], **(case.config.get("rope_scaling") or {})}
    local = case.config.get("rope_local_base_freq", case.config["rope_theta"])
    if architecture in ("olmo3", "gemma3_text"):
        sliding = {"rope_type": "default", "rope_theta": local}
        newer["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}
    else:
        newer["rope_parameters"] = full
    assert np.array_equal(logits(newer, case.tensors), logits(case.config, case.tensors))


def test_contradicting_bases_are_refused() -> None:
    case = make_case("muse_glimmer", 8)
    config = {**case.config, "rope_parameters": {"rope_theta": 500_000.0}}
    assert refused(config, case.tensors) == "rope_theta"


# --- refusals


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_or_misshapen_tensor_is_named(architecture: str) -> None:
    case = make_case(architecture, 8)
    for name in ("model.norm.weight", "model.layers.2.self_attn.k_proj.weight"):
        missing = {key: value for key, value in case.tensors.items() if key != name}
        assert refused(case.config, missing) == name
        assert refused(case.config, {**case.tensors, name: case.tensors[name][:-1]}) == name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tensor_that_nobody_reads_is_refused(architecture: str) -> None:
    """The scales of a quantised weight, a bias, a layer too many: other math than ours."""
    case = make_case(architecture, 8)
    for extra in ("model.layers.0.self_attn.q_proj.scales", "model.layers.4.mlp.up_proj.weight"):
        assert refused(case.config, {**case.tensors, extra: np.zeros(3, np.float32)}) == extra


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, 0, -1, True, 2.0, "48"])
def test_sizes_must_be_positive_integers(name: str, value: object) -> None:
    case = make_case("llama", 8)
    assert refused({**case.config, name: value}, case.tensors) == name


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        ("llama", {"model_type": "qwen9"}, "model_type"),
        ("llama", {"model_type": ["llama"]}, "model_type"),
        ("llama", {"max_position_embeddings": None}, "model_max_length"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads"),
        ("llama", {"head_dim": 7}, "head_dim"),
        ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ("llama", {"attention_bias": "no"}, "attention_bias"),
        ("llama", {"text_config": 3}, "text_config"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("muse_glimmer", {"sliding_window": None}, "sliding_window"),
        ("muse_glimmer", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("muse_glimmer", {"layer_types": 3}, "layer_types"),
        ("muse_glimmer", {"layer_types": ["chunked_attention"] * 4}, "layer_types[0]"),
        ("muse_glimmer", {"layer_types": None, "num_hidden_layers": 3}, "layer_types"),
        ("muse_glimmer", {"layer_rope_theta": [1.0] * 4}, "layer_rope_theta[0]"),
        ("muse_glimmer", {"layer_rope_theta": [0]}, "layer_rope_theta"),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("cohere2", {"head_dim": 16}, "head_dim"),
        ("exaone4", {"sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ("exaone4", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("afmoe", {"n_group": 2}, "n_group"),
        ("afmoe", {"score_func": "softmax"}, "score_func"),
        ("afmoe", {"num_dense_layers": -1}, "num_dense_layers"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit"),
        ("olmo3", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_type"),
        ("olmo3", {"rope_scaling": "yarn"}, "rope_scaling"),
    ],
)
def test_unsupported_configs_are_refused_by_field(
    architecture: str, changes: dict[str, Any], field: str
) -> None:
    case = make_case(architecture, 8)
    assert refused({**case.config, **changes}, case.tensors) == field


def test_messages_hold_no_weights() -> None:
    case = make_case("llama", 8)
    with pytest.raises(OracleModelError) as caught:
        build_oracle(case.config, {**case.tensors, "model.norm.weight": np.ones(5, np.float32)})
    assert str(caught.value) == "model.norm.weight: expected shape [48], found [5]"


@pytest.mark.parametrize("ids", [[], [-1], [97], [0] * 4097])
def test_bad_calls_are_refused_and_leave_the_session_as_it_was(ids: list[int]) -> None:
    session = make_case("llama", 8).oracle().new_session()
    session.prefill([1, 2, 3])
    with pytest.raises(LimitError):
        session.append(ids)
    assert session.token_ids == (1, 2, 3)
    assert "1, 2" not in repr(session)


def test_a_call_that_fails_half_way_can_be_made_again() -> None:
    """The layers that had already stored their rows take them again."""
    case = make_case("muse_glimmer", 8)
    model = case.oracle()
    session, twin = model.new_session(), model.new_session()
    session.prefill(token_ids(5))
    twin.prefill(token_ids(5))
    blocks = model.decoder.blocks
    broken = Case(case.config, case.tensors, None).oracle()
    object.__setattr__(broken.decoder, "blocks", (*blocks[:2], None, blocks[3]))
    session._model = broken
    with pytest.raises(TypeError):
        session.append([1, 2, 3, 4])
    session._model = model
    assert session.position == 5
    assert np.array_equal(session.append([9, 8]), twin.append([9, 8]))


# --- where the references part


def test_gemma3_rounds_its_embedding_scale_only_in_mlx_lm() -> None:
    """sqrt(48) = 6.9282 is 6.9375 as bfloat16; sqrt(64) is 8 in both."""
    case = make_case("gemma3_text", 8)
    scales = [case.oracle(dialect).decoder.embedding.scale for dialect in Dialect]
    assert scales == [6.9375, float(np.float32(math.sqrt(48)))]
    wide = make_case("gemma3_text", 8, changes={"hidden_size": 64})
    assert [wide.oracle(dialect).decoder.embedding.scale for dialect in Dialect] == [8.0, 8.0]


def test_a_single_afmoe_expert_is_normalised_only_in_transformers() -> None:
    case = make_case("afmoe", 8, changes={"num_experts_per_tok": 1})
    first, second = (logits(case.config, case.tensors, dialect) for dialect in Dialect)
    assert np.abs(first - second).max() > 1e-2


def test_defaults_that_differ_follow_the_dialect() -> None:
    case = make_case("afmoe", 8)
    bare = {k: v for k, v in case.config.items() if k not in ("route_scale", "mup_enabled")}
    for dialect, route_scale, mup in [
        (Dialect.MLX_LM, 2.826, True),
        (Dialect.TRANSFORMERS, 1.0, False),
    ]:
        given = {**bare, "route_scale": route_scale, "mup_enabled": mup}
        found = logits(bare, case.tensors, dialect)
        assert np.array_equal(found, logits(given, case.tensors, dialect))


def test_a_llama_slides_only_in_mlx_lm() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    case = make_case("llama", 8, changes={"layer_types": kinds})
    windows = [
        [layer.window_tokens for layer in case.oracle(dialect).layout().layers]
        for dialect in Dialect
    ]
    assert windows == [[8, None, 8, None], [None] * 4]


def test_an_exaone4_without_a_window_is_all_full_with_rotation() -> None:
    case = make_case("exaone4", 8)
    layers = build_oracle({**case.config, "sliding_window": None}, case.tensors).layout().layers
    assert all(layer.window_tokens is None and layer.rope is not None for layer in layers)


def test_a_layer_of_muse_glimmer_may_turn_off_its_rotation() -> None:
    case = make_case("muse_glimmer", 8)
    theta = case.config["rope_theta"]
    config = {**case.config, "layer_rope_theta": [theta, 0, theta, theta]}
    layers = build_oracle(config, case.tensors).layout().layers
    assert [layer.rope is None for layer in layers] == [False, True, False, False]


def test_rows_too_wide_for_a_chunk_compute_but_do_not_pack() -> None:
    """A float32 row is twice a half-precision one: 128 heads of 32 no longer fit a chunk."""
    changes = {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 32}
    model = make_case("llama", 8, changes={**changes, "num_hidden_layers": 1}).oracle()
    assert model.new_session().append([1]).shape == (1, 97)
    with pytest.raises(LimitError, match="row_bytes"):
        model.layout()


def test_configs_survive_json() -> None:
    case = make_case("gpt_oss", 8)
    parsed = json.loads(json.dumps(case.config))
    assert np.array_equal(logits(parsed, case.tensors), logits(case.config, case.tensors))
