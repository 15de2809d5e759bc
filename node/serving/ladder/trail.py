"""The cuts of one stream while it grows: what is due, and what is copied at that moment."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpack.chunk import ChunkClass
from kvpack.errors import KvpackError
from kvpack.layout import LayerKind
from kvpack.store import HoldKind, cut_cadence_tokens
from node.errors import SessionStateError
from node.serving.ladder.capture import Capture, Reuse, copy_rings
from node.serving.ladder.keeper import Keeper
from node.serving.ladder.line import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from node.economics.values import Prefill
    from node.engine_thread import EngineThread
    from node.stream import Stream

log = logging.getLogger(__name__)


class RowTrail:
    """A :class:`node.serving.reuse.Trail`.

    Args:
        engine: Where the stream's calls run.
        keeper: Makes its cuts durable.
        stream: Its tokens and its rows.
        line: What of it is sealed.
        ended: Called once, when it grows no more.
    """

    def __init__(
        self,
        engine: EngineThread,
        keeper: Keeper,
        stream: Stream,
        line: Line,
        ended: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._keeper = keeper
        self._stream: Stream | None = stream
        self._line = line
        # Also where the stream is let go without a word, but never twice.
        self._ended = weakref.finalize(self, ended)
        self._ended.atexit = False
        self._cadence_tokens = cut_cadence_tokens(line.layout)

    @property
    def has_ended(self) -> bool:
        """Whether its stream was let go."""
        return self._stream is None

    @property
    def line(self) -> Line:
        """What of the stream is sealed."""
        return self._line

    def due(self, position: int) -> bool:
        """See :class:`node.serving.reuse.Trail`."""
        return position % self._cadence_tokens == 0 and position != self._line.cut_position

    async def cut(self, kind: HoldKind, prefill: Prefill | None = None) -> None:
        """See :class:`node.serving.reuse.Trail`."""
        stream, line = self._stream, self._line
        if stream is None or stream.position < 1:
            return
        if line.is_planned(stream.position):
            self._keeper.hand_in(Reuse(kind, line=line))
            return
        rings = line.layout.state_bytes(LayerKind.SWA, stream.position)
        if not self._keeper.has_room(rings):
            self._keeper.drop()
            return
        try:
            self._keeper.hand_in(await self._capture(stream, kind, {}, prefill=prefill))
        except KvpackError as error:
            from engine import TornGenerationError

            if isinstance(error, TornGenerationError):
                raise
            self._keeper.drop()
            log.info("a cut is not kept: %s", error)

    async def keep(self, kind: HoldKind, states: Mapping[ChunkClass, bytes]) -> bytes:
        """A cut with what the stream is beyond rows and tokens; durable on return.

        Returns:
            The cut's id.

        Raises:
            SessionStateError: Nothing is computed yet, or the stream was let go.
            NodeBusyError: Too many cuts wait, or the node stops.
            KvpackError: The store refuses.
        """
        stream, line = self._stream, self._line
        if stream is None or stream.position < 1:
            raise SessionStateError("nothing is computed, so there is nothing to keep")
        await self._keeper.wait_for_room(line.layout.state_bytes(LayerKind.SWA, stream.position))
        done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._keeper.hand_in(await self._capture(stream, kind, states, done))
        with self._keeper.pace.hurried():
            return await done

    async def _capture(
        self,
        stream: Stream,
        kind: HoldKind,
        states: Mapping[ChunkClass, bytes],
        done: asyncio.Future[bytes] | None = None,
        prefill: Prefill | None = None,
    ) -> Capture:
        """Copy what the next call would overwrite."""
        generation, position = stream.generation, stream.position
        token_ids = tuple(stream.token_ids[:position])
        line = self._line
        specs, version = line.plan(position), line.version
        try:
            schedule, rings = await copy_rings(self._engine, generation, specs, line)
        except BaseException:
            # What was planned was not copied: cuts to come must not count on it.
            if line.version == version:
                line.give_up()
            raise
        return Capture(
            line, version, kind, position, token_ids, schedule, generation, rings, states,
            done=done, prefill=prefill,
        )  # fmt: skip

    def end(self) -> None:
        """See :class:`node.serving.reuse.Trail`."""
        self._stream = None
        self._ended()
