"""Bytes from one process to another: bare sockets, our push, and what else would carry them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

from bench.groups import Order
from bench.kvnode import move_turn
from bench.payload import kv_bytes, noise_file
from bench.peers import certificates, flight, grpc_stream, mooncake, nixl, sockets, zeromq
from bench.peers.pair import peer_turns
from bench.real import real_rows
from bench.turns import Turn

GROUP = "network"
REFERENCE = "sockets_tcp"


def turns(order: Order) -> Iterator[Turn]:
    """Every way once a round."""
    payload = noise_file(order.folder / "payload", kv_bytes(order.tokens))
    certificates.make(order.folder / "certificates")
    for name, module in (
        ("sockets", sockets), ("grpc_stream", grpc_stream), ("zeromq", zeromq),
        ("flight", flight), ("mooncake", mooncake), ("nixl", nixl),
    ):  # fmt: skip
        for turn in peer_turns(name, module.VARIANTS, GROUP, REFERENCE, payload, order.folder):
            for contender in turn.contenders:
                if contender.name == REFERENCE:
                    contender.against = ""
            yield turn
    for plane in ("", "b", "c"):
        yield _against_tcp(move_turn(GROUP, order.tokens, REFERENCE, plane=plane, suffix="_518"))
    real = partial(real_rows, order.folder)
    yield _against_tcp(
        move_turn(GROUP, order.tokens, REFERENCE, suffix="_518_real", real=real, rounds_max=3)
    )


def _against_tcp(turn: Turn) -> Turn:
    """Here all stand beside raw TCP, whatever carries them; a whole move does not belong here."""
    kept = [one for one in turn.contenders if not one.name.startswith("move")]
    for contender in kept:
        if contender.name.startswith("push"):
            contender.against = REFERENCE
    return dataclasses.replace(turn, contenders=kept)
