"""The largest store: making it takes minutes, however quickly a prompt is looked up in it."""

from __future__ import annotations

from collections.abc import Iterator

from bench.groups import Order
from bench.groups.lookup import turns_of
from bench.turns import Turn

GROUP = "lookup_slow"
_LARGE, _QUICK = (1_000_000,), (2_000,)


def turns(order: Order) -> Iterator[Turn]:
    """10^6 chunks."""
    yield from turns_of(GROUP, _QUICK if order.quick else _LARGE, order)
