"""A model that computes nothing: what a node asks of :mod:`engine`, with host memory behind it.

Its rows are those of :mod:`node.bench.rows`; a prefill call takes the time it is told to and makes
rows visible that lie there already, so that the measured machine is busy with the move and not with
making numbers up. Logits depend on the first and last row of every plane, so that the probe of a
commit would notice planes that were put together wrongly.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from blake3 import blake3

from kvpack.errors import LayoutMismatchError, LimitError
from kvpack.identity import CallSchedule, Identity, NumericsFingerprint
from kvpack.layout import CacheLayout, Encoding, Producer
from kvpack.limits import check_range
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs
from node.bench.planes import Arrivals, HostPlanes
from node.bench.rows import RowSource
from node.engine_thread import EngineThread

if TYPE_CHECKING:
    from engine import Model

VOCAB_SIZE: Final = 4096

#: Tokens that a session may get beyond its prompt.
FURTHER_TOKENS: Final = 4096

_NO_DIGEST: Final = bytes(32)


@dataclass(slots=True)
class Pace:
    """How long calls take. Changed between two measurements, on no thread's way.

    Attributes:
        prefill_s_per_token: Of a prefill call, for each of its tokens.
        decode_s: Of a single-token call.
        stall_s: How long the next tile that is installed waits, once: a target that stops reading.
    """

    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class MadeLogits:
    """Stands in for :class:`engine.Logits`."""

    encoding: Encoding
    data: bytes

    def argmax(self) -> int:
        """The greedy token."""
        return int(np.argmax(np.frombuffer(self.data, "<f2")))

    def digest(self) -> bytes:
        """32 bytes over the raw logits."""
        return blake3(self.data).digest()


class MadeGeneration:
    """Stands in for :class:`engine.Generation`."""

    def __init__(
        self, model: MadeModel, planes: HostPlanes, schedule: CallSchedule, *, mixed: bool = False
    ) -> None:
        self.planes = planes
        self.is_mixed = mixed
        self._model = model
        self._schedule = schedule
        self._position = schedule.position

    @property
    def position(self) -> int:
        """Tokens that the state stands for."""
        return self._position

    @property
    def schedule(self) -> CallSchedule:
        """The calls that would have computed the rows."""
        return self._schedule

    @property
    def layout(self) -> CacheLayout:
        """Shape of the rows."""
        return self._model.layout

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Make the rows of the next tokens visible, after as long as the pace says."""
        pace = self._model.pace
        self._append(len(token_ids), pace.prefill_s_per_token * len(token_ids))

    def prefill_giving(
        self,
        token_ids: Sequence[int],
        specs: Sequence[TileSpec],
        give: Callable[[TileSpec, Callable[[], Tile]], None],
    ) -> None:
        """As :meth:`prefill`; each layer is done after its share of the call's time."""
        seconds, begun_s = self._model.pace.prefill_s_per_token * len(token_ids), time.monotonic()
        layers, after = len(self.layout.layers), self._position + len(token_ids)
        self._make(after)
        for spec in sorted(specs, key=lambda spec: max(spec.layers)):
            done = max(spec.layers) + 1
            if done < layers:
                _sleep_until(begun_s + seconds * done / layers)
                give(spec, functools.partial(self.planes.read, spec, after))
        self._append(len(token_ids), begun_s + seconds - time.monotonic())

    def step(self, token_id: int) -> MadeLogits:
        """Append one token; logits that depend on it, on the position and on the planes."""
        check_range("token_id", token_id, 0, VOCAB_SIZE - 1)
        self._append(1, self._model.pace.decode_s)
        seed = blake3(self.planes.last_rows(self._position))
        seed.update(token_id.to_bytes(4, "little"))
        words = np.frombuffer(seed.digest(length=2 * VOCAB_SIZE), "<u2")
        # Positive and below 2: finite, so that there is a greatest.
        return MadeLogits(Encoding.F16LE, (words & 0x3FFF).tobytes())

    def read_tile(self, spec: TileSpec) -> Tile:
        """Copy rows to a buffer of their own, as the engine does."""
        return self.planes.read(spec, self._position)

    def read_tiles(self, specs: Sequence[TileSpec]) -> list[Tile]:
        """As :meth:`read_tile`, of several."""
        return [self.read_tile(spec) for spec in specs]

    def snapshot(self, token_ids: Sequence[int]) -> SessionCacheSnapshot:
        """The whole cut at the present position."""
        specs = cut_tile_specs(self.layout, self._position)
        tiles = tuple(self.read_tile(spec) for spec in specs)
        return SessionCacheSnapshot(
            self.layout, Producer.ENGINE, self._position, tuple(token_ids), tiles
        )

    def _append(self, count: int, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        after = self._position + count
        self._make(after)
        _sleep_until(end_s)
        self._position = after
        self._schedule = self._schedule.after_call(count)

    def _make(self, after: int) -> None:
        """Let rows up to ``after`` lie there."""
        check_range("position", after, 0, self.planes.capacity_tokens, "tokens")
        made = max(self._position, self._model.made_tokens)
        if after > made:
            self.planes.make(self._model.rows, made, after)


class MadeInstaller:
    """Stands in for :class:`engine.Installer`.

    A cut that grows has room for the model's ``further_tokens`` more than it began with.
    """

    def __init__(self, model: MadeModel, position: int, *, growing: bool) -> None:
        check_range("position", position, 0, model.layout.max_context_tokens, "tokens")
        self._model = model
        self._planes = model.new_planes(position)
        self._arrivals = Arrivals(model.layout, position, growing=growing)

    @property
    def position(self) -> int:
        """Tokens that the generation will stand for."""
        return self._arrivals.position

    def grow(self, position: int) -> None:
        """Rows of full layers up to ``position`` may arrive, too."""
        self._require_room(position)
        self._arrivals.grow(position)

    def fix(self, position: int) -> None:
        """The cut is after ``position`` tokens.

        Raises:
            LayoutMismatchError: Room was taken for more rows than that.
        """
        self._require_room(position)
        self._arrivals.fix(position)

    def scatter(self, tile: Tile) -> None:
        """Put the rows of ``tile`` where they belong.

        Raises:
            LayoutMismatchError: The tile is not part of this cut, or here already.
        """
        pace = self._model.pace
        if pace.stall_s:
            stall_s, pace.stall_s = pace.stall_s, 0.0
            time.sleep(stall_s)
        self._arrivals.take(tile.spec)
        self._planes.write(tile)

    def finish(self, schedule: CallSchedule, *, mixed: bool = False) -> MadeGeneration:
        """The detached generation.

        Raises:
            LayoutMismatchError: A row is missing, or the schedule ends at another position.
        """
        if schedule.position != self.position:
            raise LayoutMismatchError("schedule.position", self.position, schedule.position)
        for layer, held, arrived in self._arrivals.missing():
            raise LayoutMismatchError(f"layers[{layer}].rows", held, arrived)
        return MadeGeneration(self._model, self._planes, schedule, mixed=mixed)

    def _require_room(self, position: int) -> None:
        check_range("position", position, 0, self._planes.capacity_tokens, "tokens")


class MadeModel:
    """Stands in for :class:`engine.Model`.

    Attributes:
        name: A label.
        layout: Shape of the rows.
        rows: Makes them.
        pace: How long calls take.
        further_tokens: Rows that planes have room for beyond those they were taken for.
        made_tokens: Rows of a new session that lie there already, invisible until prefilled.
        planes_bytes: Memory of the planes that were taken last.
    """

    def __init__(
        self,
        name: str,
        layout: CacheLayout,
        rows: RowSource | None = None,
        further_tokens: int = FURTHER_TOKENS,
    ) -> None:
        self.name = name
        self.layout = layout
        self.further_tokens = further_tokens
        self.rows = rows or RowSource(layout)
        self.pace = Pace()
        self.made_tokens = 0
        self.planes_bytes = 0

    @property
    def context(self) -> int:
        """The longest session, in tokens."""
        return self.layout.max_context_tokens

    def new_planes(self, tokens: int) -> HostPlanes:
        """Memory for a session that begins with so many tokens."""
        planes = HostPlanes(self.layout, min(tokens + self.further_tokens, self.context))
        self.planes_bytes = planes.memory_bytes
        return planes

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return VOCAB_SIZE

    @property
    def window_tokens(self) -> int:
        """The smallest window of any layer; the whole context where no layer has one."""
        windows = [layer.window_tokens for layer in self.layout.layers]
        return min((w for w in windows if w is not None), default=self.context)

    def identity(self, tenant: str) -> Identity:
        """The identity of rows that nobody computed: never that of a model's."""
        made = blake3(self.rows.name).digest()
        return Identity(
            tenant=tenant,
            weights_digest=made,
            quantisation="none",
            adapter_digest=_NO_DIGEST,
            tokenizer_digest=_NO_DIGEST,
            chat_template_digest=_NO_DIGEST,
            engine_abi="bench-made-rows",
            layout=self.layout,
        )

    def numerics(self) -> NumericsFingerprint:
        """Equal wherever this code runs: the rows are integer arithmetic."""
        return NumericsFingerprint((("backend", "bench"), ("numerics_revision", "1")))

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """One token for each byte of ``text``."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """No text stands behind these tokens."""
        raise LimitError("token_ids", "a model with a tokenizer", "made rows")

    def new_generation(self) -> MadeGeneration:
        """An empty session, whose first ``made_tokens`` rows only wait to be seen."""
        planes = self.new_planes(self.made_tokens)
        planes.make(self.rows, 0, self.made_tokens)
        return MadeGeneration(self, planes, CallSchedule())

    def installer(self, position: int, *, growing: bool = False) -> MadeInstaller:
        """A detached generation for a cut after ``position`` tokens; if growing, at least so."""
        return MadeInstaller(self, position, growing=growing)


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.monotonic()
    # Not for nothing: a sleep of no length still lets every other thread go first.
    if left_s > 0:
        time.sleep(left_s)


async def start_engine(model: MadeModel) -> EngineThread:
    """An engine thread that runs ``model``."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
    # Numpy and what else a first call loads must not count as a transfer's memory.
    await asyncio.get_running_loop().run_in_executor(executor, model.rows.warm)
    return EngineThread(executor, cast("Model", model))


def token_ids(count: int) -> list[int]:
    """Tokens of a prompt, by position."""
    positions = np.arange(count, dtype=np.int64)
    found: list[int] = ((positions * positions + 31 * positions) % VOCAB_SIZE).tolist()
    return found
