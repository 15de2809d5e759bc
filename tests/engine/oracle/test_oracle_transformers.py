"""The second witness: transformers in float32 on the same weights. Slow suite; needs torch.

Where the two references disagree, the oracle is asked for transformers' dialect. The bound is
absolute on every logit. Found on x86-64: at most 1.6e-5 (gemma3, whose logits here reach
70), at most 8e-6 for all others.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from oracle_cases import ARCHITECTURES, Case, make_case, token_ids

from engine.oracle import Dialect
from kvpack.layout import LayerKind

pytestmark = pytest.mark.slow

BOUND = 1e-4
WINDOW = 8

#: The package that this suite needs and the project does not; the CPU build is enough.
TORCH = "torch"

#: Stem of the class names in transformers.
STEMS = {
    "muse_glimmer": "MuseGlimmer",
    "cohere2": "Cohere2",
    "exaone4": "Exaone4",
    "afmoe": "Afmoe",
    "gemma3_text": "Gemma3",
    "olmo3": "Olmo3",
    "gpt_oss": "GptOss",
    "llama": "Llama",
}
TEXT_CONFIGS = ("muse_glimmer", "gemma3_text")

#: The smallest vision tower that can be made; it never sees a pixel here.
VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}

#: One expert per token shows the two normalisations of AFMoE. For OLMo 3, transformers gives a
#: config's rope_theta to the full layers alone and its own default to the sliding ones, so the
#: default is what both get here.
CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_experts_per_tok": 1},
    "olmo3": {"rope_theta": 500_000.0},
}


def require_torch() -> None:
    """A second witness that is silently absent is none, so its absence is a failure."""
    if importlib.util.find_spec(TORCH) is None:
        pytest.fail(f"transformers as a second witness needs a package: pip install {TORCH}")


def case_of(architecture: str) -> Case:
    case = make_case(architecture, WINDOW, changes=CHANGES.get(architecture))
    if architecture == "gpt_oss":
        case.config["rope_scaling"] = {**case.config["rope_scaling"], "truncate": False}
    return case


def layer_types(case: Case) -> list[str]:
    """As names; mlx-lm reads some architectures' patterns from another field."""
    names = {LayerKind.SWA: "sliding_attention", LayerKind.FULL: "full_attention"}
    return [names[layer.kind] for layer in case.oracle().layout().layers]


def network(architecture: str, case: Case) -> Any:
    """transformers' own model with the case's weights, in float32, eager attention."""
    import torch
    import transformers

    fields = copy.deepcopy(case.config)
    del fields["model_type"]
    fields |= {"layer_types": layer_types(case), "pad_token_id": None, "bos_token_id": 1}
    stem = STEMS[architecture]
    text = "Text" if architecture in TEXT_CONFIGS else ""
    config = getattr(transformers, f"{stem}{text}Config")(**fields, eos_token_id=2)
    task = "ForCausalLM"
    if architecture == "muse_glimmer":
        config = transformers.MuseGlimmerConfig(
            text_config=config, vision_config=VISION, out_hidden_size=32, projector_hidden_size=8
        )
        task = "ForConditionalGeneration"
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{stem}{task}")(config).float().eval()
    weights = {
        name: torch.from_numpy(np.ascontiguousarray(value))
        for name, value in published(architecture, case.tensors).items()
    }
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert all("vision" in key or key == "lm_head.weight" for key in result.missing_keys)
    if "lm_head.weight" in result.missing_keys:
        model.tie_weights()
    return model


def published(architecture: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors under the names and in the order that transformers keeps in memory."""
    if architecture == "muse_glimmer":
        prefix = "model.language_model."
        return {name.replace("model.", prefix, 1): value for name, value in tensors.items()}
    out = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for name in tensors:
        if name.endswith(".mlp.experts.gate_proj.weight"):
            out |= fused_experts(architecture, tensors, name.removesuffix("gate_proj.weight"))
    return out


def fused_experts(
    architecture: str, tensors: Mapping[str, np.ndarray], stem: str
) -> dict[str, np.ndarray]:
    gate, up, down = (tensors[f"{stem}{part}_proj.weight"] for part in ("gate", "up", "down"))
    if architecture == "afmoe":
        return {f"{stem}gate_up_proj": np.concatenate([gate, up], 1), f"{stem}down_proj": down}
    biases = [tensors[f"{stem}{part}_proj.bias"] for part in ("gate", "up", "down")]
    experts, _, hidden = gate.shape
    return {
        f"{stem}gate_up_proj": np.stack([gate, up], 2).reshape(experts, -1, hidden).swapaxes(1, 2),
        f"{stem}gate_up_proj_bias": np.stack(biases[:2], 2).reshape(experts, -1),
        f"{stem}down_proj": down.swapaxes(1, 2),
        f"{stem}down_proj_bias": biases[2],
    }


def witness(model: Any, calls: list[list[int]]) -> np.ndarray:
    """Logits ``[tokens, vocab]`` of calls through transformers' own cache."""
    import torch

    # As node/produce/network/forward.py: 5.17 has the older name, 5.24 the newer one.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, parts = None, []
    with torch.no_grad():
        for ids in calls:
            out = model(input_ids=torch.tensor([ids]), **{named: cache}, use_cache=True)
            cache = getattr(out, named)
            parts.append(out.logits[0].numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_agree_with_transformers(architecture: str) -> None:
    require_torch()
    case = case_of(architecture)
    model = network(architecture, case)
    oracle = case.oracle(Dialect.TRANSFORMERS)
    for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 5 * WINDOW + 3):
        ids = token_ids(length)
        found = oracle.new_session().append(ids)
        assert np.abs(found - witness(model, [ids])).max() < BOUND, f"{length} tokens"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_agree_through_the_cache_of_transformers(architecture: str) -> None:
    require_torch()
    case = case_of(architecture)
    ids = token_ids(43)
    edges = [0, 7, 10, 20, 21, 22, 42, 43]
    calls = [ids[first:end] for first, end in itertools.pairwise(edges)]
    session = case.oracle(Dialect.TRANSFORMERS).new_session()
    found = np.concatenate([session.append(call) for call in calls])
    assert np.abs(found - witness(network(architecture, case), calls)).max() < BOUND


@pytest.mark.parametrize("architecture", ["afmoe", "gemma3_text", "gpt_oss"])
def test_the_references_disagree_where_the_oracle_says_so(architecture: str) -> None:
    """The dialects are needed: with the other one the second witness contradicts."""
    require_torch()
    case, ids = case_of(architecture), token_ids(43)
    found = case.oracle(Dialect.MLX_LM).new_session().append(ids)
    assert np.abs(found - witness(network(architecture, case), [ids])).max() > 10 * BOUND
