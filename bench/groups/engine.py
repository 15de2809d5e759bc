"""Decode, rollback and cut: the rows of ``python -m bench.engine``, in this bench's shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.child import bench_json
from bench.groups import Order
from bench.measured import Contender, Sample
from bench.turns import Turn

GROUP = "engine"
NO_BYTES = "no bytes leave the process"

#: Rows of each part by the names that bench.engine gives them: ours, how it is called here, and who
#: it is beside.
_PARTS = {
    "decode": {
        "decode, tiny muse_glimmer": ("decode", "decode, tiny Muse Glimmer"),
        "decode, tiny cohere2": ("decode_cohere2", "decode, tiny Cohere2"),
        "decode, tiny exaone4": ("decode_exaone4", "decode, tiny EXAONE 4"),
    },
    "cut": {
        "cut, head-major": ("cut", "cut: what decoding waits for, head-major"),
        "cut, token-major": ("cut_token_major", "cut: the same, token-major"),
    },
    "rollback": {
        "rollback, planes of 52 layers, 100 windows": (
            "rollback", "rollback of 16 tokens after 100 windows, planes of 52 layers"
        ),
        "rollback, tiny muse_glimmer, 100 windows": (
            "rollback_tiny", "rollback of 16 tokens after 100 windows, tiny Muse Glimmer"
        ),
    },
}  # fmt: skip
_AGAINST = {
    "decode": ("mlx_lm", "mlx-lm's loop"),
    "cut": ("copy", "plain copy of the rings"),
    "rollback": ("near", "the same after 2 windows"),
}


def turns(order: Order) -> Iterator[Turn]:
    """One run a part holds all its rounds: its turns are between two things at one position."""
    scale = 0.1 if order.quick else 0.5
    for part in ["decode", "cut"] if order.quick else _PARTS:
        contenders = []
        for word, title in _PARTS[part].values():
            other, what = _AGAINST[part]
            their = Contender(f"{word}_{other}", f"{what}: {title}", GROUP, protects=NO_BYTES)
            contenders += [Contender(word, title, GROUP, their.name, NO_BYTES), their]
        yield Turn(contenders, partial(_run, part, scale, order.limit_s), rounds_max=1)


def _run(part: str, scale: float, limit_s: float) -> dict[str, list[Sample]]:
    found = bench_json(
        "bench.engine", "--json", "--scale", str(scale), "--only", part, limit_s=limit_s
    )  # fmt: skip
    samples = {}
    for row in found["rows"]:
        word, _ = _PARTS[part][row["name"]]
        other, _ = _AGAINST[part]
        for name, side in ((word, "ours"), (f"{word}_{other}", "theirs")):
            rounds = enumerate(row["rounds_s"][side])
            samples[name] = [Sample(seconds, 0, round=number) for number, seconds in rounds]
    return samples
