"""Check that one exported folder means the same to mlx-lm, transformers and this folder's model.

    python examples/train/check_export.py FOLDER --text FILE

Needs mlx-lm, transformers and torch together. Exits with 1 when logits differ by more than the
tolerance, all computed in float32 on the same float16 weights, over more than two windows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from architecture import attention_masks
from evaluate import load_folder
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray
from transformers import AutoTokenizer
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextModel

TOLERANCE = 2e-3  # of logits, which the softcap keeps within -20 .. 20

Logits = NDArray[np.float32]


def ours(folder: Path, ids: list[int]) -> Logits:
    """Logits of the training script's own model, [tokens, vocabulary]."""
    model = load_folder(folder, torch.device("cpu"))
    masks = attention_masks(model.shape.window, len(ids), torch.device("cpu"))
    with torch.no_grad():
        return model(torch.tensor([ids]), masks)[0].numpy()


def by_transformers(folder: Path, ids: list[int]) -> Logits:
    """Logits of transformers' text model with its tied head, multiplier and softcap."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values.pop("model_type")
    config = MuseGlimmerTextConfig(**values)
    model, report = MuseGlimmerTextModel.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise SystemExit(f"transformers did not take the weights as they are: {report}")
    with torch.no_grad():
        hidden = model.eval()(torch.tensor([ids])).last_hidden_state[0]
        raw = hidden @ model.embed_tokens.weight.T * config.output_multiplier
        cap = config.final_logit_softcapping
        return (torch.tanh(raw / cap) * cap).numpy()


def by_mlx(folder: Path, ids: list[int], dtype: mx.Dtype, *, cached: bool) -> Logits:
    """Logits of mlx-lm, in one call or as chunks of 200 tokens through its cache."""
    model, _ = load(str(folder))
    model.set_dtype(dtype)
    tokens = mx.array([ids])
    if not cached:
        return np.array(model(tokens)[0].astype(mx.float32))
    cache = make_prompt_cache(model)
    parts = [model(tokens[:, i : i + 200], cache=cache)[0] for i in range(0, len(ids), 200)]
    return np.array(mx.concatenate(parts).astype(mx.float32))


def bits_per_character(logits: Logits, ids: list[int], characters: int) -> float:
    """Of the text after its first token."""
    wide = torch.from_numpy(logits[:-1]).double().log_softmax(-1)
    picked = wide.gather(1, torch.tensor(ids[1:])[:, None])
    return -picked.sum().item() / math.log(2) / characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1500)
    arguments = parser.parse_args()
    folder, text = arguments.folder, arguments.text.read_text(encoding="utf-8")[4000:12000]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"][: arguments.tokens]
    if load(str(folder))[1].encode(text)[: arguments.tokens] != ids:
        raise SystemExit("mlx-lm and transformers tokenise differently")
    characters = len(tokenizer.decode(ids[1:]))

    reference = ours(folder, ids)
    failed = False
    for name, logits in (
        ("transformers, float32", by_transformers(folder, ids)),
        ("mlx-lm, float32", by_mlx(folder, ids, mx.float32, cached=False)),
        ("mlx-lm, float32, cached", by_mlx(folder, ids, mx.float32, cached=True)),
        ("mlx-lm, float16, cached", by_mlx(folder, ids, mx.float16, cached=True)),
        ("mlx-lm, bfloat16, cached", by_mlx(folder, ids, mx.bfloat16, cached=True)),
    ):
        difference = float(np.abs(logits - reference).max())
        same = float((logits.argmax(-1) == reference.argmax(-1)).mean())
        bits = bits_per_character(logits, ids, characters)
        print(f"{name:26} max |Δ logit| {difference:.2e}  same argmax {same:.4f}  {bits:.4f} bpc")
        failed |= "float32" in name and difference > TOLERANCE
    print(f"{len(ids)} tokens; tolerance in float32 {TOLERANCE}: {'FAILED' if failed else 'ok'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
