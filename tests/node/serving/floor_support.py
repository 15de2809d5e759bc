"""A floor on a real tiny model, what a stream says alone, and keepers of rows that watch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from engine import DecodingState, SamplerState, SamplingParameters, prefill_calls
from kvpack.store import HoldKind
from node.engine_thread import EngineThread
from node.serving.floor import Floor
from node.serving.logprobs import token_logprob
from node.serving.order import Finished, Piece, RunOrder
from node.serving.reuse import NoReuse, NoTrail
from node.stream import Stream


@contextlib.asynccontextmanager
async def loaded(model_dir):
    """The engine thread with the model."""
    engine = await EngineThread.load(model_dir)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


@contextlib.asynccontextmanager
async def floor_of(model_dir, ladder=None, **options):
    """A floor that has begun; ended at the end."""
    async with loaded(model_dir) as engine:
        floor = Floor(engine, ladder or NoReuse(engine), **options)
        floor.start()
        try:
            yield floor, engine
        finally:
            await floor.close()


def order(token_ids, count=4, tenant="t", **fields):
    """A greedy order, unless told otherwise."""
    fields.setdefault("decoding", DecodingState())
    return RunOrder(tenant, tuple(token_ids), max_tokens=count, **fields)


def sampled(seed, temperature=0.8, **parameters):
    """A decoding state that draws."""
    chosen = SamplingParameters(temperature=temperature, **parameters)
    return DecodingState(SamplerState.begin(chosen, seed))


@dataclasses.dataclass
class Answer:
    """All of one answer."""

    events: list
    error: Exception | None = None

    @property
    def pieces(self):
        return [event for event in self.events if isinstance(event, Piece)]

    @property
    def ids(self):
        return [piece.token_id for piece in self.pieces]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished), (self.events[-1:], self.error)
        return self.events[-1]

    @property
    def usage(self):
        return self.finished.usage

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces) + self.finished.text


async def read(run) -> Answer:
    """Read a run to its end."""
    answer = Answer([])
    async with run:
        async for event in run:
            answer.events.append(event)
    return answer


async def ask(floor, token_ids, count=4, **fields) -> Answer:
    return await read(floor.submit(order(token_ids, count, **fields)))


def _alone(model, turns, count, decoding, grids):
    stream, said = Stream(model.new_generation(), (), model.vocab_size), []
    for turn, grid in zip(turns, grids, strict=True):
        stream.extend(turn)
        stream.decoding = decoding
        for size in prefill_calls(stream.position, stream.next_index - 1, grid):
            stream.prefill_next(size)
        said.append([stream.decode_next() for _ in range(count)])
    return said


async def alone(engine, turns, count, decoding=None, grids=None):
    """What a stream says that has the engine for itself: ``[turn][token] -> Decoded``."""
    grids = grids or [512] * len(turns)
    return await engine.call(_alone, engine.model, turns, count, decoding or DecodingState(), grids)


def same(answer, decoded) -> bool:
    """Whether tokens and probabilities are those of ``decoded``, to the last bit."""
    expected = [token_logprob(d.logits, d.token_id, 3) for d in decoded]
    return [piece.logprob for piece in answer.pieces] == expected


class Calls:
    """What stands in the engine's line, in the order in which it was put there. A bystander."""

    def __init__(self, engine) -> None:
        self.log = []
        self._submit = engine.submit
        engine.submit = self._seen

    def _seen(self, work, *args):
        name, stream, told = getattr(work, "__name__", "?"), getattr(work, "__self__", None), args
        if name == "_timed":
            # A prefill call between two looks at the clock.
            name, stream, told = "prefill_next", args[0], args[1:]
        self.log.append((name, id(stream), told))
        return self._submit(work, *args)

    def of(self, *names):
        return [entry for entry in self.log if entry[0] in names]


class WatchedTrail(NoTrail):
    """Notes where it was asked to cut, and what stood there."""

    def __init__(self, stream, cadence, cuts) -> None:
        self._stream, self._cadence, self._cuts = stream, cadence, cuts
        self.ended = 0

    def due(self, position):
        return position % self._cadence == 0

    async def cut(self, kind: HoldKind, prefill=None):
        position = self._stream.position
        await asyncio.sleep(0)
        assert self._stream.position == position
        self._cuts.append((kind, position, tuple(self._stream.token_ids[:position])))

    def end(self):
        self.ended += 1
        self._stream = None


class Watched(NoReuse):
    """Keeps nothing, and notes what it is asked."""

    def __init__(self, engine, cadence=64) -> None:
        super().__init__(engine)
        self.cuts, self.trails, self.begun = [], [], []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure = None
        self._cadence = cadence

    async def begin(self, tenant, token_ids, *, reuse=True, above=0):
        self.begun.append((len(token_ids), above))
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return await super().begin(tenant, token_ids, reuse=reuse, above=above)

    def trail(self, tenant, stream, base):
        self.trails.append(WatchedTrail(stream, self._cadence, self.cuts))
        return self.trails[-1]


async def until(condition, seconds=40.0):
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def consistent(floor) -> bool:
    """Whether all that was taken on is accounted for."""
    counts, view = floor.counts, floor.status()
    running = sum(slot.running_s > 0 or slot.prompt_tokens > 0 for slot in view.slots)
    sources = sum(counts.cached_tokens.values()) + counts.evaluated_tokens
    return (
        counts.submitted == counts.ended + running + view.waiting
        and sources == counts.prompt_tokens
    )
