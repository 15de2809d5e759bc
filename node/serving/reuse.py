"""Where an answer may begin: what the slots ask of whoever keeps rows, and a keeper of none.

The rows of a prefix are best effort. Who keeps them may lose them, be slow or be full, and an
answer is only later for it: nothing here fails an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvpack.limits import POSITION_MAX, check_range
from node.serving.order import Fallback, MissReason, Rung

if TYPE_CHECKING:
    from engine import Generation
    from kvpack.store import HoldKind
    from kvpack.store.grid import SealedGrid
    from node.economics.values import Prefill
    from node.engine_thread import EngineThread
    from node.stream import Stream


@dataclass(frozen=True, slots=True, repr=False)
class Base:
    """A state that an answer begins from: detached, and its taker's alone.

    Attributes:
        generation: The rows of the first ``position`` tokens.
        position: Tokens computed; 0 where nothing was held.
        rung: Where they were held; ``NONE`` at position 0.
        miss: Why not all of the prefix was.
        restored_bytes: Plaintext brought back for it, from the manifest.
        lineage: 16 bytes: that of the cut it was begun from; empty where there is none.
        grid: What of it is sealed already, for the cuts to come; None: nothing.
        exact: The rows are those this node would have computed. Otherwise no cut of them is kept:
            no answer could begin from it.
        fallback: Why no producer computed it, where one should have.

    Raises:
        LimitError: A count is outside its range, or the generation stands elsewhere.
    """

    generation: Generation
    position: int = 0
    rung: Rung = Rung.NONE
    miss: MissReason = MissReason.COLD
    restored_bytes: int = 0
    lineage: bytes = b""
    grid: SealedGrid | None = None
    exact: bool = True
    fallback: Fallback = Fallback.NONE

    def __post_init__(self) -> None:
        check_range("base.position", self.position, 0, POSITION_MAX, "tokens")
        check_range("base.restored_bytes", self.restored_bytes, 0, 1 << 62, "bytes")
        at = self.generation.position
        check_range("base.generation.position", at, self.position, self.position, "tokens")

    def __repr__(self) -> str:
        return f"Base({self.position} tokens, {self.rung.value})"


class Trail(Protocol):
    """The cuts of one stream while it grows. Called on the event loop, between engine calls."""

    def due(self, position: int) -> bool:
        """Whether a cut belongs at ``position`` whatever is there. Cheap: asked for each token."""

    async def cut(self, kind: HoldKind, prefill: Prefill | None = None) -> None:
        """Take a cut of the stream where it stands now.

        On return all that a next call would overwrite is copied; the rest follows in the
        background, without the stream's lock. What cannot be kept is counted and dropped: no
        failure to keep is raised, a torn generation is. The caller makes no engine call of this
        stream meanwhile.

        Args:
            kind: Why.
            prefill: How long its rows took to compute; None: that was not measured.

        Raises:
            TornGenerationError: A forward call of the stream stopped half way.
        """

    def end(self) -> None:
        """The stream grows no more. Cuts under way are finished. A second time does nothing."""


class Ladder(Protocol):
    """Whoever keeps rows. Called on the event loop; its work is done elsewhere."""

    async def begin(
        self, tenant: str, token_ids: Sequence[int], *, reuse: bool = True, above: int = 0
    ) -> Base:
        """The deepest state held of ``token_ids``, brought back.

        Cancelled at any moment it leaves nothing behind but what it had cached.

        Args:
            tenant: Whose rows may be used.
            token_ids: The whole context. Its last token is never part of the base: it is left to
                the boundary call, so the position is at most ``len(token_ids) - 1``.
            reuse: False: an empty state, miss ``DISABLED``.
            above: The caller holds so many of these tokens itself. Nothing that is not deeper is
                brought back: then the base is empty, position 0.
        """

    def trail(self, tenant: str, stream: Stream, base: Base | None) -> Trail:
        """The trail of ``stream``, which began at ``base``; None: at a state of its own.

        Args:
            tenant: Whose cuts they become.
            stream: Its tokens and its rows. The trail reads ``stream.generation`` and
                ``stream.token_ids`` at a cut; a rebuild gets a trail of its own.
            base: What :meth:`begin` gave.
        """


class NoTrail:
    """No cut is ever taken."""

    def due(self, position: int) -> bool:
        """Never."""
        return False

    async def cut(self, kind: HoldKind, prefill: Prefill | None = None) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class ForeignTrail(NoTrail):
    """That of rows which other numerics computed: no answer could begin from a cut of them."""


class NoReuse:
    """Keeps nothing: every answer is computed, except what a slot still holds."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    async def begin(
        self, tenant: str, token_ids: Sequence[int], *, reuse: bool = True, above: int = 0
    ) -> Base:
        """An empty state."""
        generation = await self._engine.call(self._engine.model.new_generation)
        return Base(generation, miss=MissReason.DISABLED)

    def trail(self, tenant: str, stream: Stream, base: Base | None) -> Trail:
        """A trail that takes none."""
        return NoTrail()
