"""Sessions made for proving: token streams without text, histories, continuations, digests.

Every call here belongs on the thread that loaded the model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from kvpack.layout import CacheLayout, LayerKind
from kvpack.snapshot import Tile, TileSpec, cut_tile_specs, tile_specs
from node.prove.cases import CHUNK_TOKENS, DECODE_STEPS, STEPS_AFTER_CHUNK, Continuation, History
from node.prove.compare import Comparison, Twin

if TYPE_CHECKING:
    from engine import Generation, Logits, Model

#: Chooses the tokens. Equal on every machine, so that two reports speak of the same cases.
_SEED: Final = "kvnode prove/1"


def token_stream(vocab_size: int, count: int, label: str = "prompt") -> list[int]:
    """The first ``count`` ids of a fixed stream; shorter ones are its beginning."""
    data = blake3(f"{_SEED}\0{label}".encode()).digest(length=4 * count)
    return [word % vocab_size for word in struct.unpack(f"<{count}I", data)]


def run_calls(generation: Generation, token_ids: Sequence[int], calls: Iterable[int]) -> None:
    """Append ``token_ids`` by calls of these sizes."""
    done = 0
    for size in calls:
        generation.prefill(token_ids[done : done + size])
        done += size


def live_session(model: Model, history: History) -> Generation:
    """A session that went this way, and was never saved or restored."""
    generation = model.new_generation()
    run_calls(generation, token_stream(model.vocab_size, history.position), history.calls)
    return generation


def continuation(model: Model, generation: Generation, kind: Continuation) -> Iterator[Logits]:
    """The logits of each single-token call of ``kind``. The tokens are given, never chosen.

    So a step that differs does not change what is asked next, and the drift can be stated.
    """
    if kind is Continuation.CHUNK:
        generation.prefill(token_stream(model.vocab_size, CHUNK_TOKENS, "chunk"))
    steps = DECODE_STEPS if kind is Continuation.DECODES else STEPS_AFTER_CHUNK
    return single_calls(model, generation, steps, kind.value)


def single_calls(model: Model, generation: Generation, steps: int, label: str) -> Iterator[Logits]:
    """The logits of ``steps`` single-token calls."""
    for token_id in token_stream(model.vocab_size, steps, label):
        yield generation.step(token_id)


def replay(
    model: Model,
    session: Generation,
    twin: Twin,
    kind: Continuation = Continuation.DECODES,
) -> Comparison:
    """Let ``session`` go on as ``twin`` did, and compare everything."""
    start = state_digest(session)
    found = list(continuation(model, session, kind))
    return twin.compare(start, found, state_digest(session))


def state_digest(generation: Generation) -> bytes:
    """32 bytes over every row of the session."""
    specs = cut_tile_specs(generation.layout, generation.position)
    return tiles_digest(generation.read_tile(spec) for spec in specs)


def tiles_digest(tiles: Iterable[Tile]) -> bytes:
    """32 bytes over ``tiles``: which rows each holds, and their bytes."""
    hasher = blake3()
    for tile in tiles:
        spec = tile.spec
        place = (spec.first_position, spec.token_count, *spec.layers)
        hasher.update(repr((spec.kind.value, place)).encode())
        hasher.update(tile.data)
    return hasher.digest()


def rows_before_and_after(
    layout: CacheLayout, position: int, end: int
) -> tuple[list[TileSpec], list[TileSpec]]:
    """The rows of the cut at ``end``, as those before ``position`` and those from there on."""
    kinds = (LayerKind.FULL, LayerKind.SWA)
    specs = [spec for kind in kinds for spec in tile_specs(layout, kind, 0, end)]
    before = [clipped for spec in specs if (clipped := _clip(spec, 0, position)) is not None]
    after = [clipped for spec in specs if (clipped := _clip(spec, position, end)) is not None]
    return before, after


def _clip(spec: TileSpec, first: int, end: int) -> TileSpec | None:
    start, stop = max(spec.first_position, first), min(spec.end_position, end)
    return TileSpec(spec.kind, spec.layers, start, stop - start) if start < stop else None


def pieces(layout: CacheLayout, tiles: Iterable[Tile]) -> list[Tile]:
    """``tiles`` cut into single layers and uneven ranges, in an order that looks random."""
    small = [piece for tile in tiles for piece in _split(layout, tile)]
    keys = [blake3(f"{_SEED}\0order\0{index}".encode()).digest() for index in range(len(small))]
    return [small[index] for index in sorted(range(len(small)), key=keys.__getitem__)]


def _split(layout: CacheLayout, tile: Tile) -> Iterator[Tile]:
    spec = tile.spec
    middle = max(1, spec.token_count * 3 // 7)
    for layer, keys, values in tile.planes(layout):
        key_bytes, value_bytes = layout.key_row_bytes(layer), layout.value_row_bytes(layer)
        for start, stop in ((0, middle), (middle, spec.token_count)):
            if start < stop:
                data = b"".join(
                    (
                        keys[start * key_bytes : stop * key_bytes],
                        values[start * value_bytes : stop * value_bytes],
                    )
                )
                first = spec.first_position + start
                yield Tile(TileSpec(spec.kind, (layer,), first, stop - start), data)
