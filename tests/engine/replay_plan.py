"""What twin and restored session both do after a cut."""

from __future__ import annotations

from engine_support import greedy, tokens

from engine import Generation

RAW_STEPS = 8
GREEDY_STEPS = 64
CHUNK_TOKENS = 24
STEPS_AFTER_CHUNK = 4


def continuation(generation: Generation, greedy_steps: int = GREEDY_STEPS) -> bytes:
    """Eight teacher-forced steps, greedy ones, a chunk and four steps: all logits, as bytes."""
    forced = [generation.step(token) for token in tokens(RAW_STEPS, salt=3)]
    free = greedy(generation, forced[-1].argmax(), greedy_steps)
    generation.prefill(tokens(CHUNK_TOKENS, salt=9))
    after = greedy(generation, 65, STEPS_AFTER_CHUNK)
    return b"".join(logits.data for logits in (*forced, *free, *after))
