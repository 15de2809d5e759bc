"""Token-major against head-major planes: decode, prefill chunks, and the cut, in turns."""

from __future__ import annotations

import time
from pathlib import Path

import engine
from bench.engine.measure import Timed, in_turns
from bench.engine.models import token_ids
from engine import Generation, Model, PlaneLayout

STEPS, CHUNK_TOKENS = 24, 128


def _model(folder: Path, layout: PlaneLayout) -> Model:
    return engine.load_model(folder, plane_layout=layout)


def _session(model: Model, tokens: int) -> Generation:
    generation = model.new_generation()
    for start in range(0, tokens, 512):
        generation.prefill(token_ids(tokens)[start : start + 512])
    return generation


def _decode(generation: Generation) -> float:
    start = time.perf_counter()
    for token in token_ids(STEPS):
        generation.step(token)
    return time.perf_counter() - start


def _chunk(generation: Generation) -> float:
    ids = token_ids(CHUNK_TOKENS)
    start = time.perf_counter()
    generation.prefill(ids)
    return time.perf_counter() - start


def decode_by_layout(folder: Path, context: int, rounds: int) -> Timed:
    """Seconds of 24 steps: head-major (ours) against token-major (theirs)."""
    head, token = (
        _session(_model(folder, layout), context)
        for layout in (PlaneLayout.HEAD_MAJOR, PlaneLayout.TOKEN_MAJOR)
    )
    return in_turns(lambda: _decode(head), lambda: _decode(token), rounds)


def chunks_by_layout(folder: Path, context: int, rounds: int) -> Timed:
    """Seconds of a chunk of 128 tokens: head-major (ours) against token-major (theirs)."""
    head, token = (
        _session(_model(folder, layout), context)
        for layout in (PlaneLayout.HEAD_MAJOR, PlaneLayout.TOKEN_MAJOR)
    )
    return in_turns(lambda: _chunk(head), lambda: _chunk(token), rounds)
