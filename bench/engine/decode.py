"""Decode speed: our planes and loop against mlx-lm's own generation loop and caches.

What each side does at a step. Both: one forward call of one token, the greedy choice made where
the logits are, and that one number brought to the host. mlx-lm's loop also normalises the logits,
and hands its next call over before it looks at the last token: it is one call ahead, and does one
call more than it is asked for. Ours keeps the logits as they are for whoever asks, keeps its books
(positions, schedule, marks) and waits for each call. The network of the other side is loaded by
mlx-lm and is not touched; ours is the one that :func:`engine.load_model` makes of the same files.
"""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.utils import load_model as load_network

import engine
from bench.engine.measure import Timed, in_turns
from bench.engine.models import token_ids
from engine import Model

SEGMENT_TOKENS = 24
PREFILL_TOKENS = 2048


class OurLoop:
    """Greedy decoding through a generation, a segment at a time."""

    def __init__(
        self,
        model: Model,
        prompt: list[int],
        *,
        read_logits: bool = False,
        ahead: bool | None = None,
    ) -> None:
        """Prefill all but the last token of ``prompt`` and compute that one.

        Args:
            model: As the engine loads it.
            prompt: At least two tokens.
            read_logits: Whether every step's logits are copied to the host as well.
            ahead: Whether calls are built ahead; None for what the engine does here.
        """
        self.generation = model.new_generation()
        if ahead is not None:
            self.generation._pays_ahead = ahead
        for start in range(0, len(prompt) - 1, PREFILL_TOKENS):
            end = min(start + PREFILL_TOKENS, len(prompt) - 1)
            self.generation.prefill(prompt[start:end])
        self.read_logits = read_logits
        self.token = self.generation.step(prompt[-1]).argmax()
        self.tokens = [self.token]

    def segment(self) -> float:
        start = time.perf_counter()
        for _ in range(SEGMENT_TOKENS):
            logits = self.generation.step(self.token)
            if self.read_logits and not logits.data:
                raise RuntimeError("no logits")
            self.token = logits.argmax()
            self.tokens.append(self.token)
        return time.perf_counter() - start


class TheirLoop:
    """mlx-lm's ``generate_step`` with its default sampler, which is greedy."""

    def __init__(self, network: object, prompt: list[int], limit: int) -> None:
        self.loop = generate_step(
            mx.array(prompt), network, max_tokens=limit, prefill_step_size=PREFILL_TOKENS
        )
        self.tokens = [next(self.loop)[0]]

    def segment(self) -> float:
        start = time.perf_counter()
        for _ in range(SEGMENT_TOKENS):
            self.tokens.append(next(self.loop)[0])
        # The call that it has under way ends within its own time, not within the other side's: of
        # SmolLM2's on a CPU a tenth is left when the last token is handed out.
        mx.synchronize(generation_stream)
        return time.perf_counter() - start


def their_loop(folder: Path, prompt: list[int], rounds: int) -> TheirLoop:
    """mlx-lm's loop on mlx-lm's own network, with room for ``rounds`` segments and warm-up."""
    network, _ = load_network(folder, strict=True)
    return TheirLoop(network, prompt, (rounds + 4) * SEGMENT_TOKENS)


def agreement(ours: OurLoop, theirs: TheirLoop) -> str:
    """How many tokens both sides chose alike, from the first on."""
    pairs = list(zip(ours.tokens, theirs.tokens, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return f"first {same} of {len(pairs)} tokens equal"


def decode_against_mlx_lm(folder: Path, rounds: int, prompt_tokens: int = 200) -> tuple[Timed, str]:
    """Seconds per segment of 24 tokens, both sessions at the same position all the time."""
    model = engine.load_model(folder)
    prompt = [token % model.vocab_size for token in token_ids(prompt_tokens)]
    ours = OurLoop(model, prompt)
    theirs = their_loop(folder, prompt, rounds)
    timed = in_turns(ours.segment, theirs.segment, rounds)
    return timed, agreement(ours, theirs)
