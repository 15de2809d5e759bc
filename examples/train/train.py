"""Train one recipe and write its weights and log.

    python examples/train/train.py main --corpus CORPUS --tokenizer TOKENIZER --out OUT

Each sequence is a function of (seed, phase, index), whatever number of processes makes them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from architecture import LanguageModel, Mask, attention_masks
from dialogue import NOVEL_WEIGHT, Author
from measures import Scorer
from novels import HELD_OUT, VALIDATION, Novel, corpus_digest, load_novel, training_names
from optimizer import Optimizer, learning_rate
from recipes import RECIPES, Recipe
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

FIRST_ORDINARY_TOKEN = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Samples(Dataset):
    """The sequences of one phase by index, each of ``tokens + 1`` ids with loss weights."""

    author: Author
    seed: tuple[int, int]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids, weights = self.author.sample(np.random.default_rng([*self.seed, index]))
        return torch.from_numpy(ids), torch.from_numpy(weights)


def batches(
    recipe: Recipe, phase_index: int, novels: tuple[Novel, ...], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one phase in order."""
    phase = recipe.phases[phase_index]
    author = Author(novels, tokenizer, phase.tokens + 1, phase.plain_share)
    samples = Samples(author, (recipe.seed, phase_index), phase.steps * phase.batch)
    loader = DataLoader(
        samples,
        batch_size=phase.batch,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=8 if workers else None,
    )
    return iter(loader)


def noised(ids: Tensor, weights: Tensor, share: float, vocabulary: int) -> Tensor:
    """Replace a share of the novel tokens by random ones; facts and turns stay as they are."""
    if share == 0.0:
        return ids
    chosen = (torch.rand(ids.shape, device=ids.device) < share) & (weights == NOVEL_WEIGHT)
    return torch.where(chosen, torch.randint_like(ids, FIRST_ORDINARY_TOKEN, vocabulary), ids)


def weighted_loss(
    logits: Tensor, targets: Tensor, weights: Tensor, teacher: Tensor | None, share: float
) -> tuple[Tensor, Tensor]:
    """(loss to minimise, plain cross-entropy over tokens of novels), both in nats per token.

    ``teacher`` holds the teachers' mean distribution, [batch, tokens, vocabulary], or nothing.
    """
    log_probabilities = logits.log_softmax(-1)
    own = functional.nll_loss(log_probabilities.flatten(0, 1), targets.flatten(), reduction="none")
    own = own.view_as(weights)
    aim = own
    if teacher is not None:
        soft = -(teacher.float() * log_probabilities).sum(-1)
        aim = (1 - share) * own + share * soft
    novel = (weights == NOVEL_WEIGHT).float()
    return (aim * weights).sum() / weights.sum(), (own * novel).sum() / novel.sum()


class Trainer:
    """One model, its optimiser and its teachers on one device."""

    def __init__(self, recipe: Recipe, teachers: list[LanguageModel], device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.teachers = recipe, device, teachers
        self.model = LanguageModel(recipe.shape, recipe.dropout).to(device)
        self.optimizer = Optimizer(self.model, recipe.weight_decay)
        self.loss = self.loss_of
        if device.type == "cuda":
            compile_layers(self.model)
            for teacher in teachers:
                compile_layers(teacher)
            self.loss = torch.compile(self.loss_of, dynamic=False)

    def autocast(self) -> torch.autocast:
        """bfloat16 matrix products; weights, sums and losses stay in float32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def teach(self, ids: Tensor, masks: tuple[Mask, Mask]) -> Tensor | None:
        """The mean of the teachers' distributions, or nothing without teachers."""
        if not self.teachers:
            return None
        with torch.no_grad(), self.autocast():
            shares = [teacher(ids, masks).softmax(-1).bfloat16() for teacher in self.teachers]
        return torch.stack(shares).mean(0) if len(shares) > 1 else shares[0]

    def loss_of(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, teacher: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The head and the loss as one compiled piece: the logits are the largest tensor here."""
        logits = self.model.logits(hidden)
        return weighted_loss(logits, targets, weights, teacher, self.recipe.teacher_share)

    def step(self, batch: tuple[Tensor, Tensor], masks: tuple[Mask, Mask], rate: float) -> Tensor:
        """One update; returns the novel-token loss as a device scalar, so nothing waits."""
        ids, weights = (part.to(self.device, non_blocking=True) for part in batch)
        clean, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        inputs = noised(
            clean, weights[:, :-1], self.recipe.token_noise, self.recipe.shape.vocabulary
        )
        teacher = self.teach(clean, masks)
        with self.autocast():
            hidden = self.model.hidden(inputs, masks)
            loss, shown = self.loss(hidden, targets, weights[:, 1:].contiguous(), teacher)
        loss.backward()
        self.optimizer.step(rate)
        return shown.detach()


def compile_layers(model: LanguageModel) -> None:
    """Compile each layer kind once instead of twelve layers in one graph."""
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def load_teacher(folder: Path, device: torch.device) -> LanguageModel:
    """A model written by this script, for evaluation only."""
    recipe = RECIPES[json.loads((folder / "run.json").read_text())["recipe"]]
    model = LanguageModel(recipe.shape).to(device)
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    return model.eval().requires_grad_(False)


def run(trainer: Trainer, arguments: argparse.Namespace, novels: tuple[Novel, ...]) -> dict:
    """Train through all phases; returns the run's facts and leaves ``log.jsonl`` behind."""
    recipe, tokenizer = (
        trainer.recipe,
        Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json")),
    )
    watched = VALIDATION if arguments.validate else HELD_OUT
    scorer = Scorer(load_novel(arguments.corpus, watched, tokenizer), tokenizer, trainer.device)
    begun, number = time.perf_counter(), 0
    with (arguments.out / "log.jsonl").open("w", encoding="utf-8") as log:
        for phase_index, phase in enumerate(recipe.phases):
            masks = attention_masks(recipe.shape.window, phase.tokens, trainer.device)
            for batch in batches(recipe, phase_index, novels, tokenizer, arguments.workers):
                rate = learning_rate(
                    number,
                    recipe.steps,
                    recipe.learning_rate,
                    recipe.warmup_steps,
                    recipe.decay_share,
                )
                loss = trainer.step(batch, masks, rate)
                number += 1
                scored = number % arguments.every == 0 or number == recipe.steps
                if scored or number % 20 == 0:
                    line = {
                        "step": number,
                        "seconds": round(time.perf_counter() - begun, 1),
                        "learning_rate": rate,
                        "train_loss": round(loss.item(), 4),
                        **(scorer.score(trainer, masks, phase) if scored else {}),
                    }
                    print(json.dumps(line), flush=True)
                    log.write(json.dumps(line) + "\n")
    return {"seconds": round(time.perf_counter() - begun, 1), "watched": watched, "last": line}


def changed(recipe: Recipe, settings: list[str], steps: str | None) -> Recipe:
    """The recipe with ``key=value`` settings and step counts ("900" or "900,300") replaced."""
    values = {key: float(value) for key, value in (item.split("=") for item in settings)}
    if steps is not None:
        counts = [int(count) for count in steps.split(",")]
        pairs = zip(recipe.phases, counts, strict=False)
        values["phases"] = tuple(dataclasses.replace(p, steps=count) for p, count in pairs)
    return dataclasses.replace(recipe, **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, action="append", default=[])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", help="steps of each phase, by commas")
    parser.add_argument("--validate", action="store_true", help="leave the validation novel out")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--every", type=int, default=100, help="steps between log lines")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    recipe = changed(RECIPES[arguments.recipe], arguments.set, arguments.steps)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    names = training_names(arguments.validate)
    novels = tuple(load_novel(arguments.corpus, name, tokenizer) for name in names)
    teachers = [load_teacher(folder, device) for folder in arguments.teacher]
    trainer = Trainer(recipe, teachers, device)
    facts = {
        "recipe": arguments.recipe,
        "settings": dataclasses.asdict(recipe),
        "novels": names,
        "corpus_sha256": corpus_digest(arguments.corpus, names),
        "training_tokens_in_corpus": sum(len(novel.ids) for novel in novels),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **run(trainer, arguments, novels),
    }
    (arguments.out / "run.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    weights = {name: p.detach().float().cpu() for name, p in trainer.model.named_parameters()}
    save_file(weights, arguments.out / "weights.safetensors")


if __name__ == "__main__":
    main()
