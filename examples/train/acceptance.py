"""Measure how often a draft model's tokens are what the main model says itself.

python examples/train/acceptance.py FOLDER --draft DRAFT --corpus CORPUS --out acceptance.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from architecture import LanguageModel, attention_masks
from evaluate import Evaluation, load_folder
from novels import HELD_OUT, Novel, load_novel
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

PROMPT_TOKENS = 512
REPLY_TOKENS = 128
BLOCKS = (2, 3, 4, 8)


@torch.no_grad()
def greedy(model: LanguageModel, prompts: Tensor, count: int) -> Tensor:
    """Prompts, [rows, tokens], each continued by ``count`` most likely tokens."""
    total = prompts.shape[1] + count
    masks = attention_masks(model.shape.window, total, prompts.device, dense=True)
    ids = torch.zeros(len(prompts), total, dtype=torch.int64, device=prompts.device)
    ids[:, : prompts.shape[1]] = prompts
    for place in range(prompts.shape[1], total):
        hidden = model.hidden(ids, masks)[:, place - 1]
        ids[:, place] = model.logits(hidden).argmax(-1)
    return ids


@torch.no_grad()
def agreement(
    target: LanguageModel, draft: LanguageModel, novel: Novel, rows: int
) -> NDArray[np.bool_]:
    """Whether the draft's most likely token is the target's, [rows, reply tokens].

    The target continues stretches of the novel greedily; the draft sees the same text.
    """
    device = target.model.embed_tokens.weight.device
    starts = np.linspace(0, len(novel.ids) - PROMPT_TOKENS, rows).astype(int)
    prompts = np.stack([novel.ids[start : start + PROMPT_TOKENS] for start in starts])
    ids = greedy(target, torch.from_numpy(prompts).to(device), REPLY_TOKENS)
    masks = attention_masks(draft.shape.window, ids.shape[1], device, dense=True)
    guesses = draft(ids, masks).argmax(-1)[:, PROMPT_TOKENS - 1 : -1]
    return (guesses == ids[:, PROMPT_TOKENS:]).cpu().numpy()


def counted(right: NDArray[np.bool_], block: int) -> dict[str, float]:
    """Greedy speculative decoding with blocks of ``block`` drafted tokens.

    While drafted tokens are accepted the draft sees exactly the target's own text, so agreement
    along that text decides every block.
    """
    drafted = accepted = calls = 0
    for row in right:
        place = 0
        while place + block < len(row):
            misses = np.flatnonzero(~row[place : place + block])
            taken = int(misses[0]) if len(misses) else block
            drafted, accepted, calls = drafted + block, accepted + taken, calls + 1
            place += taken + 1
    return {
        "block_tokens": block,
        "accepted_of_drafted": accepted / drafted,
        "tokens_per_target_call": accepted / calls + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--window-tokens", type=int, default=8192)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    novel = load_novel(arguments.corpus, HELD_OUT, tokenizer)
    target, draft = (load_folder(f, device) for f in (arguments.folder, arguments.draft))
    right = agreement(target, draft, novel, arguments.prompts)
    results = {
        "prompts": arguments.prompts,
        "draft_language": Evaluation(draft, tokenizer, novel).language(arguments.window_tokens),
        "draft_agrees_per_token": float(right.mean()),
        "blocks": [counted(right, n) for n in BLOCKS],
    }
    text = json.dumps(results, indent=2)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
