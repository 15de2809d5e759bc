"""llama.cpp: the state of a context to bytes and back, by llama-cpp-python.

The payload is a GGUF file; what is saved is the state after a prompt. It names no model.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.peers import NOTHING, Variant

VARIANTS = {"state": Variant("llama.cpp: state saved and restored, in memory", NOTHING)}
_TOKENS = 512


def load() -> None:
    import llama_cpp  # noqa: F401


def store(payload: Any, folder: Path, variant: str) -> tuple[dict[str, float], Any]:
    from llama_cpp import Llama

    model = folder / "model.gguf"
    payload.tofile(model)
    try:
        context = Llama(str(model), n_ctx=2 * _TOKENS, verbose=False)
        context.eval([(number * 31) % 1000 + 3 for number in range(_TOKENS)])
        begun = time.perf_counter()
        state = context.save_state()
        between = time.perf_counter()
        context.load_state(state)
        ended = time.perf_counter()
        if context.save_state().llama_state != state.llama_state:
            raise OSError("the state that was restored is another one")
    finally:
        model.unlink()
    size = float(len(state.llama_state))
    return {"save_s": between - begun, "restore_s": ended - between, "state_bytes": size}, payload
