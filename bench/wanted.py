"""What the speed of this project has to be: data, one row each. The bounds do not move."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What is compared, and which side of the bound is good."""

    SPEED = "speed"  # of ours over that of the other: at least
    TIME = "time"  # of ours over that of the others, one after another: at most
    CPU = "cpu"  # processor seconds for a byte, ours over the other's: at most
    MILLISECONDS = "ms"  # ours alone: at most

    @property
    def at_least(self) -> bool:
        """Whether more is better."""
        return self is Kind.SPEED


@dataclass(frozen=True)
class Wanted:
    """A row.

    Attributes:
        what: For people.
        group: Who took turns.
        ours: Name of a contender.
        against: Names of others; several are done one after another.
        kind: What is compared.
        must: The bound.
        aim: A better one, or None.
    """

    what: str
    group: str
    ours: str
    against: tuple[str, ...]
    kind: Kind
    must: float
    aim: float | None = None


_SPEED, _TIME, _CPU, _MS = Kind.SPEED, Kind.TIME, Kind.CPU, Kind.MILLISECONDS

#: Rates in Gb/s, and as contenders name them; the last one is beyond where zstd has to gain all.
#: Where the rule chooses raw, its row is raw's own run: the table says so and gives no verdict.
_LINKS = (("1", "1"), ("2.5", "2_5"), ("5", "5"), ("7", "7"), ("10", "10"))

WANTED = (
    Wanted("(a) push of sealed chunks, mTLS, into planes, over a bare TLS 1.3 socket",
           "move", "push", ("bare_tls",), _SPEED, 0.85, 1.0),
    Wanted("(a) the same, sealed inside the push",
           "move", "push_sealing", ("bare_tls",), _SPEED, 0.7, 0.85),
    Wanted("(b) push on a plain gRPC stream, over raw TCP",
           "network", "push_b_518", ("sockets_tcp",), _SPEED, 0.45, 0.6),
    Wanted("(b) the same, over ZeroMQ CURVE",
           "network", "push_b_518", ("zeromq_curve",), _SPEED, 1.5),
    Wanted("(c) push on a sealed socket, over raw TCP",
           "network", "push_c_518", ("sockets_tcp",), _SPEED, 0.75, 0.9),
    Wanted("(c) the same, over Mooncake TCP, which protects nothing",
           "network", "push_c_518", ("mooncake_tcp",), _SPEED, 1.0),
    Wanted("(c) the same, over plain ZeroMQ, which protects nothing",
           "network", "push_c_518", ("zeromq_plain",), _SPEED, 1.0),
    Wanted("whole move (a), spool off, over mlx-lm save + scp + load",
           "move", "move", ("mlx_lm_scp",), _SPEED, 4.0, 5.5),
    Wanted("whole move (a), durable spool, over mlx-lm save + scp + load",
           "move", "move_spool", ("mlx_lm_scp",), _SPEED, 3.5, 4.5),
    Wanted("whole move (c), spool off, over mlx-lm save + scp + load",
           "move", "move_c", ("mlx_lm_scp",), _SPEED, 6.0, 9.0),
    Wanted("delta move (a), half held already, over the move of all of it",
           "move", "move_delta", ("move",), _SPEED, 1.0, 1.5),
    Wanted("write a pack of sealed chunks, durable, over an O_DIRECT write",
           "disk", "pack_sealed", ("direct",), _SPEED, 0.8, 0.95),
    Wanted("the same, sealed while it is written",
           "disk", "pack_sealing", ("direct",), _SPEED, 0.8, 0.95),
    Wanted("verify a pack, warm, one core, over a copy",
           "memory", "verify", ("copy",), _SPEED, 0.7, 0.9),
    Wanted("restore a pack, ready to decode, warm: time over one AES-GCM pass and one copy",
           "memory", "restore", ("floor",), _TIME, 2.0, 1.3),
    Wanted("the same: speed over mlx-lm load + eval, which checks nothing",
           "memory", "restore", ("mlx_lm_load",), _SPEED, 1.0, 2.0),
    Wanted("CPU of both ends, (a), sealed before, over the bare TLS pair's",
           "network", "push_518", ("sockets_tls",), _CPU, 1.15, 0.9),
    Wanted("CPU of both ends, (a), sealed inside, over the bare TLS pair's",
           "network", "push_518_sealing", ("sockets_tls",), _CPU, 1.3, 1.0),
    *(Wanted(f"zstd as chosen for {rate} Gb/s, real rows, whole move, over raw: never slower",
             "link", f"link_{word}_auto", (f"link_{word}_off",), _SPEED, 1.0)
      for rate, word in _LINKS),
    Wanted("zstd as chosen for a link without bound, the same",
           "link", "link_unbound_auto", ("link_unbound_off",), _SPEED, 1.0),
    *(Wanted(f"zstd as chosen for {rate} Gb/s, over raw on a link that carries as much more as it "
             "saves: full gain, less 5 parts of 100",
             "link", f"link_{word}_auto", (f"link_{word}_full",), _SPEED, 0.95, 1.0)
      for rate, word in _LINKS[:-1]),
    Wanted("prefix lookup, 10^6 chunks, milliseconds",
           "lookup_slow", "lookup_1000000", (), _MS, 5.0, 1.0),
    Wanted("decode over mlx-lm's loop",
           "engine", "decode", ("decode_mlx_lm",), _SPEED, 1.0, 1.05),
)  # fmt: skip
