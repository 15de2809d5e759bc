"""Decode speed: our planes and loop against mlx-lm's own generation loop and caches."""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step

import engine
from bench.engine.measure import Timed, in_turns
from bench.engine.models import network_of, token_ids
from engine import Model

SEGMENT_TOKENS = 24


class OurLoop:
    """Greedy decoding through a generation, a segment at a time."""

    def __init__(self, model: Model, prompt: list[int]) -> None:
        self.generation = model.new_generation()
        self.generation.prefill(prompt[:-1])
        self.token = self.generation.step(prompt[-1]).argmax()
        self.tokens = [self.token]

    def segment(self) -> float:
        start = time.perf_counter()
        for _ in range(SEGMENT_TOKENS):
            self.token = self.generation.step(self.token).argmax()
            self.tokens.append(self.token)
        return time.perf_counter() - start


class TheirLoop:
    """mlx-lm's ``generate_step`` with its default sampler, which is greedy."""

    def __init__(self, network: object, prompt: list[int], limit: int) -> None:
        self.loop = generate_step(mx.array(prompt), network, max_tokens=limit)
        self.tokens = [next(self.loop)[0]]

    def segment(self) -> float:
        start = time.perf_counter()
        for _ in range(SEGMENT_TOKENS):
            self.tokens.append(next(self.loop)[0])
        return time.perf_counter() - start


def decode_against_mlx_lm(folder: Path, rounds: int, prompt_tokens: int = 200) -> Timed:
    """Seconds per segment of 24 tokens, both sessions at the same position all the time."""
    model = engine.load_model(folder)
    prompt = [token % model.vocab_size for token in token_ids(prompt_tokens)]
    ours = OurLoop(model, prompt)
    theirs = TheirLoop(network_of(model), prompt, (rounds + 4) * SEGMENT_TOKENS)
    return in_turns(ours.segment, theirs.segment, rounds)
