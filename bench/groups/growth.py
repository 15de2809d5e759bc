"""How cost grows with the context. Chunks of a store: ``lookup``; sessions: ``sessions``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.format.pack import KEYRING, make_pack
from bench.format.restore import restored
from bench.groups import Order
from bench.kvnode import AT_REST, OURS, bench_move, sample_of_move
from bench.machine import provide_memory
from bench.measured import Contender, Sample
from bench.payload import kv_bytes
from bench.turns import Turn, in_process
from kvpack.verify import verify_bundle

GROUP = "growth"
_TOKENS = (2_048, 8_192, 32_768, 131_071)
_QUICK = (512, 1_024)
_COPIES = 4


def turns(order: Order) -> Iterator[Turn]:
    """Smaller ones first."""
    for tokens in _QUICK if order.quick else _TOKENS:
        yield _moved(tokens)
        path = make_pack(order.folder / f"pack-{tokens}", max(1, kv_bytes(tokens) >> 20))
        size = path.stat().st_size
        verify, restore = (
            Contender(f"context_{tokens}_{word}", f"{word}, {tokens:,} tokens", GROUP,
                      protects=AT_REST)
            for word in ("verify", "restore")
        )  # fmt: skip
        yield in_process(verify, size, lambda path=path: verify_bundle(path, KEYRING))
        yield in_process(restore, size, lambda path=path: restored(path))


def _moved(tokens: int) -> Turn:
    move, push = (
        Contender(f"context_{tokens}_{word}", f"kvnode: {title}, {tokens:,} tokens", GROUP,
                  protects=OURS)
        for word, title in (("move", "whole move"), ("push", "read, seal, send and install"))
    )  # fmt: skip

    def once() -> dict[str, Sample]:
        values = bench_move(["--tokens", str(tokens), "--kind", "session", "--without-pushes"])
        pushed_s = values["prefill_s"] + values["phases"]["pushed_s"]
        return {
            move.name: sample_of_move(values),
            push.name: Sample(pushed_s, values["payload_bytes"]),
        }

    return Turn([move, push], once, partial(provide_memory, _COPIES * kv_bytes(tokens)))
