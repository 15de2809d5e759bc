"""A cut as it waits: what was copied at its moment, and where the rest is still to be read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvpack.chunk import ChunkClass
from kvpack.identity import CallSchedule
from kvpack.snapshot import Tile, TileSpec
from kvpack.store import HoldKind
from node.serving.ladder.line import Line

if TYPE_CHECKING:
    from engine import Generation
    from node.economics.values import Prefill
    from node.engine_thread import EngineThread

#: Rows that one call copies on the engine's thread: whoever decodes waits that long.
CALL_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Capture:
    """One cut on its way into the store.

    Attributes:
        line: Whose.
        version: Of the line, when it was copied.
        kind: Why it is made.
        position: Tokens that it stands for.
        token_ids: Exactly those. The user's text.
        schedule: The calls that computed the rows.
        generation: Where rows of full layers are read later.
        rings: What was copied.
        states: Plaintext of SESSION and SAMPLER chunks; empty for a text of nobody's session.
        indexed: Whether other texts may begin from it.
        done: Told the cut's id, or why there is none; None: nobody has to know which.
        prefill: How long its rows took to compute; None: not measured.
        settled: Set when it is durable or given up.
    """

    line: Line
    version: int
    kind: HoldKind
    position: int
    token_ids: tuple[int, ...]
    schedule: CallSchedule
    generation: Generation
    rings: Mapping[TileSpec, Tile]
    states: Mapping[ChunkClass, bytes]
    indexed: bool = True
    done: asyncio.Future[bytes] | None = None
    prefill: Prefill | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ring_bytes(self) -> int:
        """What it holds in memory until it is written."""
        return sum(len(tile.data) for tile in self.rings.values())


@dataclass(frozen=True, slots=True, repr=False)
class Reuse:
    """A cut that is there already, or waits, is used again, or for another reason.

    Attributes:
        kind: The reason.
        cut_id: Which cut; empty: the newest one of ``line``, once that is written.
        line: Whose.
    """

    kind: HoldKind
    cut_id: bytes = b""
    line: Line | None = None

    @property
    def line_cut_id(self) -> bytes:
        """The newest cut of the line; empty where none is written."""
        return b"" if self.line is None else self.line.cut_id


def batches(specs: Sequence[TileSpec], line: Line) -> Iterator[list[TileSpec]]:
    """``specs`` in groups that one call copies."""
    batch: list[TileSpec] = []
    batch_bytes = 0
    for spec in specs:
        size = spec.data_bytes(line.layout)
        if batch and batch_bytes + size > CALL_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(spec)
        batch_bytes += size
    if batch:
        yield batch


async def copy_rings(
    engine: EngineThread, generation: Generation, specs: Sequence[TileSpec], line: Line
) -> tuple[CallSchedule, dict[TileSpec, Tile]]:
    """Copy ``specs``, a few in each call; with the calls that computed the rows.

    Raises:
        TornGenerationError: A forward call of this generation stopped half way.
        RowsNotLiveError: A row was overwritten or is not computed yet.
        NodeBusyError: Too many calls wait for the engine.
    """
    rest = batches(specs, line)
    schedule, tiles = await engine.call(_schedule_and_tiles, generation, next(rest, []))
    for batch in rest:
        tiles.update(await engine.call(read_tiles, generation, batch))
    return schedule, tiles


def read_tiles(generation: Generation, specs: Sequence[TileSpec]) -> dict[TileSpec, Tile]:
    """Copy ``specs``. Runs on the engine's thread."""
    return dict(zip(specs, generation.read_tiles(specs), strict=True))


def _schedule_and_tiles(
    generation: Generation, specs: Sequence[TileSpec]
) -> tuple[CallSchedule, dict[TileSpec, Tile]]:
    # Also where nothing is copied: the schedule's property folds what it counts.
    return generation.schedule, read_tiles(generation, specs)
