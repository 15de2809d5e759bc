"""A ladder over a real store and a real tiny model, driven as the slots drive it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from engine import DecodingState, SamplerState, SamplingParameters
from kvpack.keys import Keyring, generate_key
from kvpack.snapshot import cut_tile_specs
from kvpack.store import Budget, CutReader, HoldKind, open_store
from kvpack.store.listing import all_holds
from node.binding import PackBinding
from node.engine_thread import EngineThread
from node.serving.ladder import RowLadder
from node.stream import Stream
from tests.small_model import make_small_model

WINDOW = 16
CALL = 512


def make_model(
    folder: Path, arch: str = "muse_glimmer", window: int = WINDOW, seed: int = 5
) -> Path:
    make_small_model(folder, arch, seed=seed, window=window, layers=4)
    return folder


def text(count: int, salt: int = 0) -> list[int]:
    """Token ids without a short period."""
    return [(i * i * 31 + i * 17 + salt * 101 + 5) % 251 for i in range(count)]


def seeded(seed: int = 7) -> DecodingState:
    """Sampling at temperature 0.8 with a fixed seed."""
    return DecodingState(SamplerState.begin(SamplingParameters(temperature=0.8), seed))


@dataclasses.dataclass
class Turn:
    """What one answer took."""

    stream: Stream
    base: object
    evaluated: int
    tokens: list[int]
    logits: list[bytes]


class Place:
    """One engine, one store folder, keys of two tenants; a ladder that can be started again."""

    def __init__(self, engine: EngineThread, folder: Path, **options) -> None:
        self.engine = engine
        self.folder = folder
        self.options = options
        self.keys = {name: generate_key(name) for name in ("ours", "theirs")}
        self.numerics = None
        self.ladder: RowLadder | None = None

    def binding(self, tenant: str) -> PackBinding:
        binding = PackBinding.of(self.engine.model, self.keys[tenant])
        return (
            binding
            if self.numerics is None
            else dataclasses.replace(binding, numerics=self.numerics)
        )

    def open(self) -> RowLadder:
        options = {"budget": Budget(free_bytes_min=0), "busy": lambda: False, **self.options}
        ladder = RowLadder(
            self.engine, self.binding, open_store(self.folder, create=True), **options
        )
        ladder.start()
        self.ladder = ladder
        return ladder

    async def again(self) -> RowLadder:
        """Close the ladder and open another: what was in memory is gone."""
        await self.ladder.close()
        return self.open()

    async def __aenter__(self) -> Place:
        self.open()
        return self

    async def __aexit__(self, *_) -> None:
        await self.ladder.close()

    @property
    def keyring(self) -> Keyring:
        return Keyring(list(self.keys.values()))

    async def answer(
        self, ids, count: int, *, tenant="ours", decoding=None, reuse=True, cuts=True, call=CALL
    ) -> Turn:
        """One answer of ``count`` tokens, with the cuts that the slots take."""
        engine, ladder = self.engine, self.ladder
        base = await ladder.begin(tenant, ids, reuse=reuse)
        stream = Stream(base.generation, ids, engine.model.vocab_size, decoding)
        trail = ladder.trail(tenant, stream, base)
        evaluated = len(ids) - base.position
        while size := stream.backlog_call(call):
            await engine.call(stream.prefill_next, size)
            if cuts and trail.due(stream.position):
                await trail.cut(HoldKind.CADENCE)
        if cuts:
            await trail.cut(HoldKind.PROMPT)
        tokens, logits = [], []
        for _ in range(count):
            decoded = await engine.call(stream.decode_next)
            tokens.append(decoded.token_id)
            logits.append(bytes(decoded.logits.data))
            if cuts and trail.due(stream.position):
                await trail.cut(HoldKind.CADENCE)
        if cuts:
            await trail.cut(HoldKind.TURN)
        trail.end()
        return Turn(stream, base, evaluated, tokens, logits)

    async def cold(self, ids, count: int, decoding=None, call=CALL) -> Turn:
        """The same without anything kept."""
        return await self.answer(ids, count, decoding=decoding, reuse=False, cuts=False, call=call)

    def chunks(self) -> list[Path]:
        """The files of all chunks in the store."""
        return sorted((self.folder / "chunks").iterdir())

    def reader(self, cut_id: bytes) -> CutReader:
        return CutReader(open_store(self.folder), self.keyring, cut_id)

    def holds(self):
        return list(all_holds(open_store(self.folder)))


async def rows(engine: EngineThread, generation) -> list[bytes]:
    """Every row of a generation, tile by tile."""

    def read():
        specs = cut_tile_specs(generation.layout, generation.position)
        return [bytes(generation.read_tile(spec).data) for spec in specs]

    return await engine.call(read)
