"""Prefill a text with a model folder and keep the cut as a pack, for ``ratios.py`` and ``path.py``.

python bench/compression/prefill.py FOLDER TEXT OUT.kvpack [--tokens 4096] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import engine
from kvpack.bundle import Header, write_snapshot
from kvpack.chunk import ChunkClass, SealContext, seal_component
from kvpack.keys import EpochKey
from kvpack.publish import publish_new

#: The packs hold public text and exist for an afternoon: their key is no secret.
KEY = EpochKey("bench", 1, bytes(32))


def prefill(folder: Path, text: str, tokens_max: int, dtype: str | None, out: Path) -> None:
    model = engine.load_model(folder, dtype=dtype)
    ids = model.encode(text)[:tokens_max]
    generation = model.new_generation()
    started = time.perf_counter()
    for size in engine.prefill_calls(0, len(ids) - 1):
        generation.prefill(ids[generation.position : generation.position + size])
        print(f"{folder.name}: {generation.position} tokens", flush=True)
    logits = generation.step(ids[-1])
    seconds = time.perf_counter() - started
    header = Header.of(model.identity(KEY.tenant), KEY.epoch)
    context = SealContext(KEY, header.identity_digest, header.layout_digest)
    last = seal_component(context, ChunkClass.FINAL_LOGITS, len(ids) - 1, 1, b"\1" + logits.data)
    snapshot = generation.snapshot(ids)
    with publish_new(out) as sink:
        schedule = generation.schedule
        write_snapshot(sink, KEY, header, snapshot, model.numerics(), schedule, components=[last])
    print(f"{out.name}: {len(ids)} tokens in {seconds:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"])
    given = parser.parse_args()
    prefill(given.folder, given.text.read_text("utf-8"), given.tokens, given.dtype, given.out)
