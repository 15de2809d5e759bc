"""llama.cpp's own state, saved and restored, beside a copy of as many bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.groups import Order
from bench.measured import NOT_INSTALLED, Contender, Sample
from bench.peers import llama
from bench.peers.pair import require_installed, stored
from bench.turns import NoFigureError, Turn, in_process

GROUP = "llama"


def turns(order: Order) -> Iterator[Turn]:
    """A GGUF file is named by ``KVPACK_BENCH_GGUF``: none comes with llama.cpp."""
    source = np.ones(64 << 20, np.uint8)
    target = np.zeros_like(source)
    copy = Contender("copy_64", "copy of 64 MiB, one thread", GROUP)
    yield in_process(copy, len(source), lambda: np.copyto(target, source))
    for variant, how in llama.VARIANTS.items():
        contender = Contender(f"llama_{variant}", how.title, GROUP, copy.name, how.protects)

        def once(contender: Contender = contender, variant: str = variant) -> dict[str, Sample]:
            require_installed("llama")
            model = Path(os.environ.get("KVPACK_BENCH_GGUF", ""))
            if not model.is_file():
                raise NoFigureError(NOT_INSTALLED, "no GGUF file: set KVPACK_BENCH_GGUF")
            # Its state is its own: how many bytes it has is what it says.
            found = stored("llama", variant, llama.VARIANTS[variant], model, order.folder)
            seconds = found.detail["save_s"] + found.detail["restore_s"]
            size = 2 * int(found.detail["state_bytes"])
            return {contender.name: Sample(seconds, size, None, found.detail)}

        yield Turn([contender], once)
