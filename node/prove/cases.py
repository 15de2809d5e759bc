"""The case list: which sessions are cut where, and what is restored how. Data, nothing else.

Positions are where faults live: around one and two windows, deep in the ring, and around the step
in which a plane's memory grows. Each is reached in several ways, because the way decides which
route of attention wrote the ring. Everything follows from the model's shape, so two machines with
one model compare the same cases.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvpack.limits import GRID_TOKENS, SPECULATIVE_BLOCK_TOKENS_MAX

#: Single-token calls of a continuation.
DECODE_STEPS: Final = 40

#: A chunk of the continuation that goes on with a chunk, and the single-token calls after it.
CHUNK_TOKENS: Final = 24
STEPS_AFTER_CHUNK: Final = 16

#: Single-token calls after a block was settled.
STEPS_AFTER_BLOCK: Final = 8

#: Block sizes: the ends of what is allowed, and sizes that cross the ring's seam unevenly.
BLOCKS: Final = (1, 2, 7, 15, 16)
_BLOCKS_QUICK: Final = (2, 16)

#: One call of more tokens needs a mask of more than 16 MiB; chunks are what such prompts get.
CALL_TOKENS_MAX: Final = 4096

#: Room that a case needs after its position.
_ROOM_TOKENS: Final = 2 * (CHUNK_TOKENS + DECODE_STEPS)

_QUICK_STATIONS: Final = 6

#: Cases that run whatever the time: a group without any would say nothing.
_ESSENTIAL_STATIONS: Final = 3


class Group(enum.Enum):
    """The groups of the report, in its order."""

    CONTROL = "control"
    SNAPSHOT = "snapshot"
    PACK = "pack"
    TILES = "tiles"
    USED = "used"
    ROLLBACK = "rollback"
    SINGLE_CALLS = "single calls"
    CHUNK_SIZES = "chunk sizes"
    BLOCKS = "blocks"

    @property
    def title(self) -> str:
        """For people."""
        return _TITLES[self]

    @property
    def is_promised(self) -> bool:
        """Whether bits are promised; else the calls have unequal shapes, and drift is measured."""
        return self not in (Group.SINGLE_CALLS, Group.CHUNK_SIZES, Group.BLOCKS)


_TITLES: Final = {
    Group.CONTROL: "control: no cache",
    Group.SNAPSHOT: "from a snapshot",
    Group.PACK: "from a pack",
    Group.TILES: "tiles, any order",
    Group.USED: "over a used session",
    Group.ROLLBACK: "rollback, k of n",
    Group.SINGLE_CALLS: "1 token vs chunks",
    Group.CHUNK_SIZES: "chunks 256 vs 300",
    Group.BLOCKS: "greedy, blocks of 16",
}


class Route(enum.Enum):
    """How a cut comes back."""

    SNAPSHOT = "snapshot"
    PACK = "pack"
    TILES = "tiles"
    USED = "used"

    @property
    def group(self) -> Group:
        """Where its cases are counted."""
        return Group(self.value)


class Continuation(enum.Enum):
    """What twin and restored session do after the cut."""

    DECODES = "decodes"
    CHUNK = "chunk"

    @property
    def calls(self) -> int:
        """Forward calls."""
        return DECODE_STEPS if self is Continuation.DECODES else 1 + STEPS_AFTER_CHUNK

    @property
    def tokens(self) -> int:
        """Tokens that it appends."""
        if self is Continuation.DECODES:
            return DECODE_STEPS
        return CHUNK_TOKENS + STEPS_AFTER_CHUNK


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the case list depends on.

    Attributes:
        windows: The distinct windows of the layers that have one, ascending.
        context_tokens: Longest context.
    """

    windows: tuple[int, ...]
    context_tokens: int


@dataclass(frozen=True, slots=True)
class History:
    """The forward calls that lead to a position.

    Attributes:
        label: For people.
        runs: ``(tokens of a call, calls)``, in order.

    Raises:
        ValueError: A number is not positive.
    """

    label: str
    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if any(tokens < 1 or calls < 1 for tokens, calls in self.runs):
            raise ValueError(f"history {self.label!r}: calls must have tokens")

    @classmethod
    def of(cls, label: str, calls: Iterable[int]) -> History:
        """The history of these call sizes; calls of no token are left out."""
        grouped = itertools.groupby(size for size in calls if size)
        return cls(label, tuple((size, len(list(same))) for size, same in grouped))

    @property
    def calls(self) -> Iterator[int]:
        """Size of each call."""
        for tokens, calls in self.runs:
            yield from itertools.repeat(tokens, calls)

    @property
    def position(self) -> int:
        """Tokens of all calls."""
        return sum(tokens * calls for tokens, calls in self.runs)

    @property
    def title(self) -> str:
        """Where it leads and how, for people."""
        return f"T={self.position} by {self.label}"

    @property
    def single_calls(self) -> int:
        """How many calls have one token."""
        return sum(calls for tokens, calls in self.runs if tokens == 1)


@dataclass(frozen=True, slots=True)
class Station:
    """A session that is cut, and the restores that are made of the cut.

    Attributes:
        name: Unique in a plan, and the name of its files.
        history: How the position is reached.
        restores: How the cut comes back, and what is done then.
        essential: Runs whatever the time.
    """

    name: str
    history: History
    restores: tuple[tuple[Route, Continuation], ...]
    essential: bool = False

    @property
    def label(self) -> str:
        """For people."""
        return self.history.title


@dataclass(frozen=True, slots=True)
class RollbackStation:
    """A cut from which blocks are computed and taken back in part.

    Attributes:
        name: Unique in a plan, and the name of its files.
        history: How the position is reached.
        blocks: ``(tokens of the block, tokens that stay)``.
        essential: Runs whatever the time.
    """

    name: str
    history: History
    blocks: tuple[tuple[int, int], ...]
    essential: bool = False

    @property
    def label(self) -> str:
        """For people."""
        return self.history.title


@dataclass(frozen=True, slots=True)
class ShapePair:
    """The same tokens by two lists of calls. Nothing is promised; the difference is measured.

    Attributes:
        group: Group of the report.
        left: One way.
        right: The other.
        block_tokens: After it, this many tokens by one call and by single calls; 0 for none.
    """

    group: Group
    left: History
    right: History
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is compared, in the order of importance.

    Attributes:
        control: Computed twice without any cache in one process, and once more in the other.
        stations: Cuts and restores.
        rollbacks: Blocks that are taken back.
        shapes: Unequal call shapes.
        left_out: What this list does not hold, and why.
    """

    control: History
    stations: tuple[Station, ...]
    rollbacks: tuple[RollbackStation, ...]
    shapes: tuple[ShapePair, ...]
    left_out: tuple[str, ...]


def make_plan(shape: ModelShape, *, quick: bool) -> Plan:
    """The case list for a model of this shape."""
    left_out: list[str] = []
    if not shape.windows:
        left_out.append("positions around a window: no layer of this model has one")
    windows = _tested_windows(shape)
    places = [
        (position, windows[-1])
        for position in _positions(windows)
        if position + _ROOM_TOKENS <= shape.context_tokens
    ]
    stations = _quick_stations(places) if quick else _all_stations(places, left_out)
    if quick:
        left_out.append("--quick: most positions, and most ways to reach them")
    return Plan(
        control=_chunks(min(2 * windows[-1] + 1, places[-1][0]), windows[-1]),
        stations=stations,
        rollbacks=_rollbacks(shape, windows, quick),
        shapes=_shapes(shape),
        left_out=tuple(left_out),
    )


def _tested_windows(shape: ModelShape) -> tuple[int, ...]:
    """The smallest and the largest window; without any, one that no layer has."""
    if not shape.windows:
        return (64,)
    return tuple(sorted({shape.windows[0], shape.windows[-1]}))


def _positions(windows: Sequence[int]) -> list[int]:
    """Every position once, those that found faults most often first."""
    growth = [GRID_TOKENS + 1, GRID_TOKENS, GRID_TOKENS - 1]
    found: list[int] = []
    for w in windows:
        near = [w + 1, w, growth[0], 5 * w + 3, w - 1, 2 * w + 1, 1, 2 * w, 2 * w - 1]
        found.extend((*near, w + 2, w - 2, *growth[1:]))
    return [position for position in dict.fromkeys(found) if position > 0]


def _chunks(position: int, window: int) -> History:
    """Chunks that cross the ring's seam at another place each time."""
    size = min(max(2, 3 * window // 4), CALL_TOKENS_MAX)
    label = f"chunks of {size}"
    return History.of(label, [size] * (position // size) + [position % size])


def _decodes(position: int, steps: int) -> History:
    # Too long for one call: the rest comes in chunks of the largest.
    before = position - steps
    whole = [CALL_TOKENS_MAX] * (before // CALL_TOKENS_MAX) + [before % CALL_TOKENS_MAX]
    return History.of(f"prefill and {steps} decodes", [*whole, *[1] * steps])


def _histories(position: int, window: int, left_out: list[str]) -> list[History]:
    """Ways to reach ``position``, no two with the same calls."""
    ways = [_chunks(position, window)]
    ways += [_decodes(position, steps) for steps in (40, 1, 300) if steps < position]
    if position <= CALL_TOKENS_MAX:
        ways.append(History.of("one prefill", [position]))
    else:
        left_out.append(f"T={position} by one call: it is longer than {CALL_TOKENS_MAX} tokens")
    ways.append(History.of("single steps", [1] * position))
    distinct = {way.runs: way for way in reversed(ways)}
    return [way for way in ways if distinct[way.runs] is way]


_ALL_RESTORES: Final = tuple(itertools.product(Route, Continuation))

#: Every route once and both continuations, the other way round from one station to the next.
_ALTERNATING: Final = tuple(
    tuple((route, order[index % 2]) for index, route in enumerate(Route))
    for order in (tuple(Continuation), tuple(reversed(Continuation)))
)


def _quick_stations(places: Sequence[tuple[int, int]]) -> tuple[Station, ...]:
    stations = []
    for index, (position, window) in enumerate(places[:_QUICK_STATIONS]):
        ways = _histories(position, window, [])
        stations.append(
            Station(f"s{index}", ways[index % len(ways)], _ALTERNATING[index % 2], essential=True)
        )
    return tuple(stations)


def _all_stations(places: Sequence[tuple[int, int]], left_out: list[str]) -> tuple[Station, ...]:
    """In rounds: each position once, in ways that take turns, then each once more."""
    ways = [_histories(position, window, left_out) for position, window in places]
    rounds: list[History] = []
    for turn in range(max(map(len, ways))):
        for index, own in enumerate(ways):
            if turn < len(own):
                rounds.append(own[(turn + index) % len(own)])
    return tuple(
        Station(f"s{index}", history, _ALL_RESTORES, essential=index < _ESSENTIAL_STATIONS)
        for index, history in enumerate(rounds)
    )


def _rollbacks(
    shape: ModelShape, windows: Sequence[int], quick: bool
) -> tuple[RollbackStation, ...]:
    sizes = _BLOCKS_QUICK if quick else BLOCKS
    # Also where a block is wider than a ring: its first rows have scrolled out when it ends.
    blocks = tuple((n, k) for n in sizes for k in range(n + 1))
    positions = [
        position
        for w in windows
        for position in (max(1, w - SPECULATIVE_BLOCK_TOKENS_MAX // 2), w, 5 * w + 3)
        if position + _ROOM_TOKENS <= shape.context_tokens
    ]
    if quick:
        positions = positions[:1]
    return tuple(
        RollbackStation(f"r{index}", _chunks(position, windows[-1]), blocks, essential=index == 0)
        for index, position in enumerate(dict.fromkeys(positions))
    )


def _shapes(shape: ModelShape) -> tuple[ShapePair, ...]:
    # Small chunks may happen to be computed as single calls are; 64 rows are a matrix product.
    short = min(3 * 64 + 1, shape.context_tokens // 2)
    long = min(3 * 300, shape.context_tokens // 2)
    base = _sized(short, 64)
    single = History.of("single steps", [1] * short)
    return (
        ShapePair(Group.SINGLE_CALLS, single, base),
        ShapePair(Group.CHUNK_SIZES, _sized(long, 256), _sized(long, 300)),
        ShapePair(Group.BLOCKS, base, base, SPECULATIVE_BLOCK_TOKENS_MAX),
    )


def _sized(position: int, size: int) -> History:
    return History.of(f"chunks of {size}", [size] * (position // size) + [position % size])
