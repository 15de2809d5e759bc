"""One process of :mod:`bench.gpu.replay`: it loads the model, and computes or restores.

Arguments: ``compute`` or ``restore``, then the model folder, the folder of the packs, and options.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import engine
from bench.gpu.common import token_ids
from engine import Generation, Model, backend
from node.prove.cuts import Cut, make_key, read_pack, write_pack

PACK = "cut.kvpack"
SAID = "never-saved.json"
LOGITS = "never-saved.logits"


def main() -> None:
    """Do one of the two, and print."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    made = argparse.ArgumentParser()
    made.add_argument("what", choices=["compute", "restore"])
    made.add_argument("model", type=Path)
    made.add_argument("folder", type=Path)
    made.add_argument("--device", choices=backend.DEVICES)
    made.add_argument("--context", type=int, default=0)
    made.add_argument("--steps", type=int, required=True)
    options = made.parse_args()
    if options.device is not None:
        backend.use_device(options.device)
    model = engine.load_model(options.model)
    if options.what == "compute":
        said = compute(model, options.folder, options.context, options.steps)
    else:
        said = restore(model, options.folder, options.steps)
    said["backend"] = backend.backend_name()
    said["numerics"] = dict(model.numerics().values)
    print(json.dumps(said))


def prefilled(model: Model, ids: list[int]) -> Generation:
    """A session after ``ids``."""
    generation, done = model.new_generation(), 0
    for calls in engine.prefill_calls(0, len(ids)):
        generation.prefill(ids[done : done + calls])
        done += calls
    return generation


def compute(model: Model, folder: Path, context: int, steps: int) -> dict[str, object]:
    """A session that is never saved goes on; another one of the same calls is saved."""
    ids = token_ids(context, model.vocab_size)
    start = time.perf_counter()
    never = prefilled(model, ids)
    prefill_s = time.perf_counter() - start
    token, tokens = ids[-1], []
    with (folder / LOGITS).open("wb") as file:
        for _ in range(steps):
            tokens.append(token)
            logits = never.step(token)
            file.write(logits.data)
            token = logits.argmax()
    (folder / SAID).write_text(json.dumps({"tokens": tokens, "encoding": logits.encoding.value}))
    del never
    saved = prefilled(model, ids)
    make_key(folder)
    start = time.perf_counter()
    snapshot = saved.snapshot(ids)
    snapshot_s = time.perf_counter() - start
    start = time.perf_counter()
    pack_bytes = write_pack(folder / PACK, folder, model, Cut(snapshot, saved.schedule))
    return {
        "prefill_s": prefill_s,
        "snapshot_s": snapshot_s,
        "write_pack_s": time.perf_counter() - start,
        "cut_bytes": sum(len(tile.data) for tile in snapshot.tiles),
        "pack_bytes": pack_bytes,
    }


def restore(model: Model, folder: Path, steps: int) -> dict[str, object]:
    """The saved session goes on, fed with the tokens of the one that was never saved."""
    start = time.perf_counter()
    cut = read_pack(folder / PACK, folder, model)
    read_s = time.perf_counter() - start
    start = time.perf_counter()
    installer = model.installer(cut.snapshot.position, producer=cut.snapshot.producer)
    for tile in cut.snapshot.tiles:
        installer.scatter(tile)
    generation = installer.finish(cut.schedule)
    install_s = time.perf_counter() - start
    said = json.loads((folder / SAID).read_text())
    expected = (folder / LOGITS).read_bytes()
    equal = same_token = 0
    drift: list[float] = []
    start = time.perf_counter()
    for number, token in enumerate(said["tokens"][:steps]):
        logits = generation.step(token)
        size = len(logits.data)
        other = engine.Logits(logits.encoding, expected[number * size : (number + 1) * size])
        equal += logits.data == other.data
        same_token += logits.argmax() == other.argmax()
        drift.append(float(abs(logits.values() - other.values()).max()))
    return {
        "position": cut.snapshot.position,
        "read_pack_s": read_s,
        "install_s": install_s,
        "steps": len(drift),
        "bitwise_equal": equal,
        "equal_tokens": same_token,
        "most_drift": max(drift),
        "greatest_logit": float(abs(logits.values()).max()),
        "steps_s": time.perf_counter() - start,
    }


if __name__ == "__main__":
    main()
