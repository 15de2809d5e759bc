"""What is measured while training and afterwards: bits per character and retrieval."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from architecture import LanguageModel, Mask
from needles import Needle, make_needle, needle_batch
from novels import Ids, Novel
from tokenizers import Tokenizer
from torch import Tensor

if TYPE_CHECKING:
    from recipes import Phase
    from train import Trainer

WATCHED_NEEDLES = 32


def windows(ids: Ids, tokens: int) -> tuple[Tensor, Tensor]:
    """Non-overlapping windows of one novel: inputs and targets, each [windows, tokens].

    Every token of the novel is a target once. Each window begins with ``<|bos|>`` (id 1) and knows
    nothing of the text before it; the last is padded with targets of -1.
    """
    count = math.ceil(len(ids) / tokens)
    targets = np.full(count * tokens, -1, dtype=np.int64)
    targets[: len(ids)] = ids
    targets = targets.reshape(count, tokens)
    inputs = np.concatenate([np.ones((count, 1), dtype=np.int64), targets[:, :-1]], axis=1)
    return torch.from_numpy(np.maximum(inputs, 0)), torch.from_numpy(targets)


@torch.no_grad()
def token_losses(
    model: LanguageModel, inputs: Tensor, targets: Tensor, masks: tuple[Mask, Mask], batch: int
) -> Tensor:
    """Cross-entropy of each target in nats, [windows, tokens] on the CPU; zero at padding.

    Batches all have ``batch`` rows, the last one filled up with zeros, so that a compiled model
    sees one shape.
    """
    device = model.model.embed_tokens.weight.device
    rows = []
    for first in range(0, len(inputs), batch):
        part, aims = inputs[first : first + batch], targets[first : first + batch]
        filled = torch.zeros(batch, inputs.shape[1], dtype=torch.int64)
        filled[: len(part)] = part
        logits = model(filled.to(device), masks)[: len(part)]
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), aims.to(device).flatten(), ignore_index=-1, reduction="none"
        )
        rows.append(losses.view(aims.shape).float().cpu())
    return torch.cat(rows)


@torch.no_grad()
def exact_answers(
    model: LanguageModel, needles: list[Needle], tokens: int, masks: tuple[Mask, Mask], batch: int
) -> list[bool]:
    """For each needle, whether greedy decoding gives exactly its answer.

    One forward pass suffices: greedy decoding gives the answer if and only if, with the answer as
    input, every answer token is the most likely one at its place.
    """
    device = model.model.embed_tokens.weight.device
    verdicts = []
    for first in range(0, len(needles), batch):
        part = needles[first : first + batch]
        ids, answers = needle_batch(part + part[:1] * (batch - len(part)), tokens)
        guesses = model(torch.from_numpy(ids).to(device), masks).argmax(-1).cpu().numpy()
        right = (guesses[:, :-1] == ids[:, 1:]) | (answers[:, 1:] == 0)
        verdicts += right.all(axis=1)[: len(part)].tolist()
    return verdicts


class Scorer:
    """The two numbers watched while training, at the phase's sequence length."""

    def __init__(self, novel: Novel, tokenizer: Tokenizer, device: torch.device) -> None:
        self.novel, self.tokenizer, self.device = novel, tokenizer, device

    def score(self, trainer: Trainer, masks: tuple[Mask, Mask], phase: Phase) -> dict[str, float]:
        """Bits per character of the novel, and the share of needles answered exactly."""
        trainer.model.eval()
        with trainer.autocast():
            inputs, targets = windows(self.novel.ids, phase.tokens)
            nats = token_losses(trainer.model, inputs, targets, masks, phase.batch).sum().item()
            scores = {"bits_per_character": round(nats / math.log(2) / self.novel.characters, 4)}
            for style in ("plain", "chat"):
                needles = self.needles(style, phase.tokens)
                exact = exact_answers(trainer.model, needles, phase.tokens, masks, phase.batch)
                scores[f"needle_{style}"] = sum(exact) / len(exact)
        trainer.model.train()
        return scores

    def needles(self, style: str, tokens: int) -> list[Needle]:
        """The same needles each time, over distances that fit in ``tokens``."""
        rng = np.random.default_rng(99)
        distances = rng.integers(tokens // 4, tokens * 3 // 4, WATCHED_NEEDLES)
        return [
            make_needle(self.tokenizer, self.novel, rng, style=style, distance=int(distance))
            for distance in distances
        ]
