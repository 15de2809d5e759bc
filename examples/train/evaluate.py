"""Measure an exported float16 folder: bits per character, what history is worth, retrieval.

    python examples/train/evaluate.py FOLDER --corpus CORPUS --out evaluation.json

The float16 weights are computed with in float32 and with dense masks: no kernel of the training
run is used here.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from architecture import LanguageModel, attention_masks, shape_from_config
from facts import NAME, OTHER_KINDS, Kind
from measures import exact_answers, token_losses, windows
from needles import STYLES, make_needle
from novels import HELD_OUT, Novel, load_novel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

ROOM = 200  # tokens that a needle prompt needs beside the distance


def load_folder(folder: Path, device: torch.device) -> LanguageModel:
    """The model of an exported folder, its weights widened to float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = LanguageModel(shape_from_config(config))
    model.load_state_dict(
        {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    )
    return model.to(device).eval().requires_grad_(False)


class Evaluation:
    """One model, one unseen novel, one device."""

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, novel: Novel) -> None:
        self.model, self.tokenizer, self.novel = model, tokenizer, novel
        self.device = model.model.embed_tokens.weight.device

    def losses(self, tokens: int, *, cut: bool = False) -> Tensor:
        """Nats of every token, [windows, tokens]; ``cut`` narrows full layers to one window."""
        near, past = attention_masks(self.model.shape.window, tokens, self.device, dense=True)
        inputs, targets = windows(self.novel.ids, tokens)
        masks = (near, near if cut else past)
        return token_losses(self.model, inputs, targets, masks, batch=max(8192 // tokens, 1))

    def language(self, tokens: int) -> dict[str, float]:
        """Bits per character and perplexity per token over non-overlapping windows."""
        nats = self.losses(tokens).sum().item()
        return {
            "window_tokens": tokens,
            "bits_per_character": nats / math.log(2) / self.novel.characters,
            "perplexity_per_token": math.exp(nats / len(self.novel.ids)),
        }

    def history(self, tokens: int, first: int) -> dict[str, float]:
        """Mean nats per token at positions from ``first``, with and without far history."""
        _, targets = windows(self.novel.ids, tokens)
        late = (targets >= 0) & (torch.arange(tokens) >= first)
        whole, cut = self.losses(tokens)[late], self.losses(tokens, cut=True)[late]
        gain = cut - whole
        return {
            "from_position": first,
            "tokens": int(late.sum()),
            "nats_full_history": whole.mean().item(),
            "nats_history_cut_to_one_window": cut.mean().item(),
            "gain": gain.mean().item(),
            "gain_standard_error": (gain.std() / math.sqrt(len(gain))).item(),
        }

    def retrieval(
        self, style: str, distance: int, count: int, *, kind: Kind = NAME, cut: bool = False
    ) -> float:
        """Share of needles at this distance that greedy decoding answers exactly."""
        rng = np.random.default_rng([distance, STYLES.index(style)])
        needles = [
            make_needle(self.tokenizer, self.novel, rng, style=style, distance=distance, kind=kind)
            for _ in range(count)
        ]
        tokens = distance + ROOM
        near, past = attention_masks(self.model.shape.window, tokens, self.device, dense=True)
        masks = (near, near if cut else past)
        exact = exact_answers(self.model, needles, tokens, masks, batch=max(16384 // tokens, 1))
        return sum(exact) / len(exact)


def measure(evaluation: Evaluation, quick: bool) -> dict[str, object]:
    """Everything that concerns one model alone."""
    long, count = (1024, 4) if quick else (8192, 100)
    distances = (256, 512) if quick else (512, 1024, 2048, 4096, 6144, 7680)
    far = distances[-1] if quick else 4096
    window = evaluation.model.shape.window
    return {
        "novel": evaluation.novel.name,
        "characters": evaluation.novel.characters,
        "tokens": len(evaluation.novel.ids),
        "language": [evaluation.language(tokens) for tokens in (long // 4, long)],
        "history": evaluation.history(long, 2 * window if quick else 8 * window),
        "retrieval_prompts_each": {"all": count, str(far): 4 * count, "kinds": count},
        "retrieval": {
            style: {
                str(d): evaluation.retrieval(style, d, 4 * count if d == far else count)
                for d in distances
            }
            for style in STYLES
        },
        "retrieval_history_cut": evaluation.retrieval("chat", far, count, cut=True),
        "retrieval_other_kinds": {
            kind.name: evaluation.retrieval("chat", far, count, kind=kind) for kind in OTHER_KINDS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--novel", default=HELD_OUT)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a small run that proves nothing")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    novel = load_novel(arguments.corpus, arguments.novel, tokenizer)
    model = load_folder(arguments.folder, device)
    results = measure(Evaluation(model, tokenizer, novel), arguments.quick)
    text = json.dumps(results, indent=2)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
