"""Further ways to move a whole cache, at the usual size."""

from __future__ import annotations

from collections.abc import Iterator

from bench.groups import Order
from bench.groups.move import ways
from bench.kvnode import move_turn
from bench.turns import Turn

GROUP = "move_518"
REFERENCE = "mlx_lm_scp"


def turns(order: Order) -> Iterator[Turn]:
    """Each plane, and each way to get mlx-lm's file across."""
    tokens = order.tokens
    for plane in ("", "b", "c"):
        yield move_turn(GROUP, tokens, REFERENCE, plane=plane, pushes=False)
    yield from ways(GROUP, REFERENCE, order, tokens, ("scp", "scp_gcm", "rsync"))
