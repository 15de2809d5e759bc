"""A whole move of the headline's cache, beside what a user of mlx-lm does today."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

from bench.groups import Order
from bench.kvnode import move_turn
from bench.machine import provide_memory
from bench.measured import Contender
from bench.payload import kv_bytes
from bench.peers import mlx_lm, ssh
from bench.turns import NoFigureError, Turn

GROUP = "move"
REFERENCE = "mlx_lm_scp"

#: Of a session that moves: planes of both ends with room for more, what is sealed, the spool.
_COPIES = 4


def turns(order: Order) -> Iterator[Turn]:
    """Ours with and without the spool, over a plain socket, a delta; and save, scp, load."""
    tokens = order.large_tokens
    held = tokens // 2 // 256 * 256
    ours = [
        move_turn(GROUP, tokens, REFERENCE),
        move_turn(GROUP, tokens, REFERENCE, spools=True, pushes=False, suffix="_spool"),
        move_turn(GROUP, tokens, REFERENCE, plane="c", pushes=False),
        move_turn(GROUP, tokens, REFERENCE, held=held, pushes=False, suffix="_delta"),
    ]
    yield from provided([*ours, *ways(GROUP, REFERENCE, order, tokens, ("scp",))], tokens)


def ways(
    group: str, reference: str, order: Order, tokens: int, chosen: tuple[str, ...]
) -> Iterator[Turn]:
    """What a user of mlx-lm does, each beside ``reference``, which is one of them."""
    try:
        daemon = order.kept.enter_context(ssh.running(order.folder / "ssh"))
        ends = [order.kept.enter_context(mlx_lm.end(what)) for what in (str(tokens), "load")]
        made = list(mlx_lm.ways_turns(group, tokens, *ends, daemon, order.folder, chosen))
    except NoFigureError as error:
        made = [_missing(group, reference, error)]
    for turn in made:
        for contender in turn.contenders:
            contender.against = "" if contender.name == reference else reference
        yield turn


def provided(turns: list[Turn], tokens: int) -> Iterator[Turn]:
    """The same, each with as much memory as it will take in the hands of this machine before."""
    for turn in turns:
        provide = partial(provide_memory, _COPIES * kv_bytes(tokens))

        def before(first=turn.before, provide=provide) -> None:
            if first is not None:
                first()
            provide()

        yield dataclasses.replace(turn, before=before)


def _missing(group: str, name: str, error: NoFigureError) -> Turn:
    contender = Contender(name, "mlx-lm: save, scp, load", group, protects=mlx_lm.PROTECTS)

    def once() -> dict[str, object]:
        raise error

    return Turn([contender], once)
