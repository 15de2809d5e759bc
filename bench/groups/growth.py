"""How cost grows with the context. Chunks of a store: ``lookup``; sessions: ``sessions``."""

from __future__ import annotations

from collections.abc import Iterator

from bench.format.pack import KEYRING, make_pack
from bench.format.restore import restored
from bench.groups import Order
from bench.kvnode import OURS, bench_move, sample_of_move, sample_of_push
from bench.measured import Contender, Sample
from bench.payload import kv_bytes
from bench.turns import Turn, in_process
from kvpack.verify import verify_bundle

GROUP = "growth"
_TOKENS = (2_048, 8_192, 32_768, 131_071)
_QUICK = (512, 1_024)


def turns(order: Order) -> Iterator[Turn]:
    """Smaller ones first."""
    for tokens in _QUICK if order.quick else _TOKENS:
        yield _moved(tokens)
        path = make_pack(order.folder / f"pack-{tokens}", max(1, kv_bytes(tokens) >> 20))
        size = path.stat().st_size
        verify = Contender(f"context_{tokens}_verify", f"verify, {tokens:,} tokens", GROUP)
        yield in_process(verify, size, lambda path=path: verify_bundle(path, KEYRING))
        restore = Contender(f"context_{tokens}_restore", f"restore, {tokens:,} tokens", GROUP)
        yield in_process(restore, size, lambda path=path: restored(path))


def _moved(tokens: int) -> Turn:
    move, push = (
        Contender(f"context_{tokens}_{word}", f"kvnode: {title}, {tokens:,} tokens", GROUP,
                  protects=OURS)
        for word, title in (("move", "whole move"), ("push", "push of sealed chunks"))
    )  # fmt: skip

    def once() -> dict[str, Sample]:
        values = bench_move(["--tokens", str(tokens), "--kind", "session"])
        return {move.name: sample_of_move(values), push.name: sample_of_push(values)}

    return Turn([move, push], once)
