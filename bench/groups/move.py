"""A whole move of the headline's cache, beside what a user of mlx-lm does today."""

from __future__ import annotations

from collections.abc import Iterator

from bench.groups import Order
from bench.kvnode import move_turn
from bench.measured import Contender
from bench.peers import mlx_lm, ssh
from bench.turns import NoFigureError, Turn

GROUP = "move"
REFERENCE = "mlx_lm_scp"


def turns(order: Order) -> Iterator[Turn]:
    """Ours with and without the spool, a delta, and the ways of mlx-lm."""
    tokens = order.large_tokens
    yield from move_turn(GROUP, tokens, REFERENCE)
    yield from move_turn(
        GROUP, tokens, REFERENCE, spools=True, pushes=False, suffix="_spool"
    )  # fmt: skip
    for plane in ("b", "c"):
        yield from move_turn(GROUP, tokens, REFERENCE, plane=plane, pushes=False)
    held = tokens // 2 // 256 * 256
    yield from move_turn(GROUP, tokens, REFERENCE, held=held, pushes=False, suffix="_delta")
    try:
        daemon = order.kept.enter_context(ssh.running(order.folder / "ssh"))
        ends = [order.kept.enter_context(mlx_lm.end(what)) for what in (str(tokens), "load")]
        ways = list(mlx_lm.ways_turns(GROUP, tokens, *ends, daemon, order.folder))
    except NoFigureError as error:
        ways = [_missing(error)]
    for turn in ways:
        for contender in turn.contenders:
            if contender.name != REFERENCE:
                contender.against = REFERENCE
        yield turn


def _missing(error: NoFigureError) -> Turn:
    contender = Contender(
        REFERENCE, "mlx-lm: save, scp, load", GROUP, protects=mlx_lm.PROTECTS
    )  # fmt: skip

    def once() -> dict[str, object]:
        raise error

    return Turn([contender], once)
