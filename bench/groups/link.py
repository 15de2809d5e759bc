"""zstd on links of several rates: a whole move of real rows, raw and compressed.

The move is the product's (``kvnode bench move``), the rows are those that a model computed, and the
link is the kernel's (:mod:`bench.link`). ``auto`` is what ``kvnode migrate --link-gbits`` chooses
at that rate: where that is off, its runs are those of off. What could be gained at most is the part
of the bytes that does not travel, so a second row is ours beside a link that carries as much more.
Faster than what the rule and the wanted rows are about, zstd is there once, for a look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from bench.groups import Order
from bench.kvnode import OURS, bench_move, sample_of_move
from bench.link import bare_seconds, behind
from bench.measured import Contender, Sample
from bench.peers import NOTHING
from bench.real import real_rows
from bench.turns import Turn
from node.migrate import compresses

GROUP = "link"

#: Gb/s; None: what the machine does.
_RATES: tuple[float | None, ...] = (1.0, 2.5, 5.0, 7.0, 10.0, None)
_QUICK: tuple[float | None, ...] = (1.0, None)
_TOKENS = 16_384
_FULL_GAIN_GBITS = 7.0
_BARE_BYTES = 128 << 20


def turns(order: Order) -> Iterator[Turn]:
    """A turn a rate: both ways beside each other, and how fast the link is for a bare socket."""
    tokens = min(order.tokens, _TOKENS)
    for gbits in _QUICK if order.quick else _RATES:
        word, title = word_of(gbits), "no bound" if gbits is None else f"{gbits:g} Gb/s"
        bare = Contender(f"link_{word}_tcp", f"raw TCP, {title}", GROUP, protects=NOTHING)
        off, on, auto, full = (
            Contender(f"link_{word}_{name}", f"kvnode: whole move of real rows, {title}: {what}",
                      GROUP, against, OURS)
            for name, what, against in (
                ("off", "raw", bare.name),
                ("on", "zstd", f"link_{word}_off"),
                ("auto", "as chosen for that link", f"link_{word}_off"),
                ("full", "raw, had the link carried as much more as zstd saves",
                 f"link_{word}_off"),
            )
        )  # fmt: skip
        if gbits is not None and gbits <= _FULL_GAIN_GBITS:
            # Who of both begins changes from round to round.
            once = partial(_both, gbits, tokens, order, ["off", "on"])
            yield Turn([bare, off, on, auto, full], once)
            continue
        yield Turn([bare, off, auto], partial(_raw, gbits, tokens, order))
        yield Turn([on], partial(_compressed, gbits, tokens, order), rounds_max=1)


def word_of(gbits: float | None) -> str:
    """The rate in a contender's name."""
    return "unbound" if gbits is None else f"{gbits:g}".replace(".", "_")


def _move(gbits: float | None, tokens: int, order: Order, way: str) -> Sample:
    arguments = ["--tokens", str(tokens), "--kind", "session", "--without-pushes"]
    arguments += ["--rows", str(real_rows(order.folder)), "--compression", way]
    return sample_of_move(bench_move(arguments, prefix=behind(gbits)))


def _bare(gbits: float | None) -> Sample:
    return Sample(bare_seconds(behind(gbits), _BARE_BYTES), _BARE_BYTES)


def _both(gbits: float, tokens: int, order: Order, ways: list[str]) -> Mapping[str, Sample]:
    found = {way: _move(gbits, tokens, order, way) for way in ways}
    ways.reverse()
    off, on = found["off"], found["on"]
    saved = on.detail["wire_bytes"] / off.detail["wire_bytes"]
    full = Sample(off.seconds * saved, off.byte_count, detail={"saved": saved})
    found |= {"tcp": _bare(gbits), "auto": on if compresses(gbits) else off, "full": full}
    return {f"link_{word_of(gbits)}_{name}": sample for name, sample in found.items()}


def _raw(gbits: float | None, tokens: int, order: Order) -> Mapping[str, Sample]:
    """Where the rule is off whatever the rows are: what was chosen is what was measured."""
    if compresses(gbits):
        raise ValueError(f"the rule compresses at {gbits} Gb/s")
    off, word = _move(gbits, tokens, order, "off"), word_of(gbits)
    return {f"link_{word}_tcp": _bare(gbits), f"link_{word}_off": off, f"link_{word}_auto": off}


def _compressed(gbits: float | None, tokens: int, order: Order) -> Mapping[str, Sample]:
    return {f"link_{word_of(gbits)}_on": _move(gbits, tokens, order, "on")}
