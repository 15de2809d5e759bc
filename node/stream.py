"""Tokens, their rows, and what comes next, whoever they belong to.

Known tokens are those given from outside or generated here. Rows exist for the first
``generation.position`` of them; the rest is the backlog. The last known token is always left to a
single-token call, the boundary call, on whichever node makes it: a call of another shape gives
other bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpack.errors import LimitError
from kvpack.snapshot import Tile, TileSpec
from node.errors import SessionStateError

if TYPE_CHECKING:
    from engine import DecodingState, Generation, Logits, SamplerState
    from node.serving.reuse import Trail


@dataclass(frozen=True, slots=True, repr=False)
class Decoded:
    """One generated token.

    Attributes:
        index: Its position.
        token_id: The token.
        logits: What it was chosen from; None where that was not kept.
    """

    index: int
    token_id: int
    logits: Logits | None


class Stream:
    """One context that grows by calls of the engine.

    ``extend``, ``prefill_next`` and ``decode_next`` run on the engine thread, one at a time, and
    each leaves tokens and rows in agreement: a caller may vanish between any two of them.

    Attributes:
        token_ids: Known tokens, by position. The user's text: never logged.
        generation: The rows.
        decoding: How the next token is chosen, and what of the text waits. Greedy by default.
        told_index: The first token that no client was given yet, by position.
        trail: The cuts of this stream, where somebody takes them.
    """

    def __init__(
        self,
        generation: Generation,
        token_ids: Sequence[int] = (),
        vocab_size: int = 0,
        decoding: DecodingState | None = None,
    ) -> None:
        from engine import DecodingState

        self.decoding = decoding or DecodingState()
        self.token_ids = list(token_ids)
        self.told_index = len(self.token_ids)
        self.generation = generation
        self.trail: Trail | None = None
        self._vocab_size = vocab_size
        self._last: Decoded | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.token_ids)} tokens)"

    @property
    def position(self) -> int:
        """Tokens computed."""
        return self.generation.position

    @property
    def next_index(self) -> int:
        """Tokens known; the position of the next one to be generated."""
        return len(self.token_ids)

    @property
    def is_worked_off(self) -> bool:
        """Whether all known tokens but the last are computed."""
        return self.position >= self.next_index - 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Make ``token_ids`` known. Computes nothing.

        Raises:
            LimitError: An id is outside the vocabulary.
            SessionStateError: The context would overflow. Nothing changed.
        """
        self._require_room(self.next_index, token_ids)
        if token_ids:
            sampler = self.decoding.sampler.observe(token_ids)
            self.decoding = dataclasses.replace(self.decoding, sampler=sampler)
            self.token_ids.extend(token_ids)
            self.told_index = self.next_index

    def _require_room(self, known: int, token_ids: Sequence[int]) -> None:
        limit = self.generation.layout.max_context_tokens
        if known + len(token_ids) > limit:
            raise SessionStateError(
                f"the context holds {limit} tokens; {known} are known and "
                f"{len(token_ids)} were given"
            )
        if token_ids and max(token_ids) >= self._vocab_size:
            raise LimitError("token_ids", f"ids below {self._vocab_size}", "an id outside")

    def holds_beginning_of(self, token_ids: Sequence[int]) -> bool:
        """Whether all computed tokens, and the boundary token after them, are ``token_ids``'."""
        position = self.position
        if not 0 < position < len(token_ids):
            return False
        # The newest first: where two contexts differ they mostly differ late.
        if self.token_ids[position - 1] != token_ids[position - 1]:
            return False
        return self.token_ids[:position] == list(token_ids[:position])

    def turn_to(self, token_ids: Sequence[int], decoding: DecodingState) -> None:
        """Be the context ``token_ids``, which begins with the computed tokens of this one.

        Raises:
            SessionStateError: It begins otherwise. Nothing changed.
        """
        if not self.holds_beginning_of(token_ids):
            raise SessionStateError(f"the {self.position} computed tokens are no beginning of it")
        self.token_ids[:] = token_ids
        self.decoding = decoding
        self.told_index, self._last = self.next_index, None

    def backlog_calls(self) -> list[int]:
        """Sizes of the prefill calls that lead up to the boundary token."""
        from engine import prefill_calls

        return prefill_calls(self.position, max(self.position, self.next_index - 1))

    def backlog_call(self, call_tokens: int) -> int:
        """Size of the next of them, on the grid of multiples of ``call_tokens``; 0: none is left.

        Each call may be on another grid: the next edge of any grid lies ahead, wherever it stands.
        """
        last = self.next_index - 1
        if self.position >= last:
            return 0
        edge = (self.position // call_tokens + 1) * call_tokens
        return min(edge, last) - self.position

    def prefill_next(self, call_tokens: int) -> None:
        """Compute the next ``call_tokens`` known tokens in one forward call."""
        start = self.position
        self.generation.prefill(self.token_ids[start : start + call_tokens])

    def prefill_giving(
        self,
        call_tokens: int,
        specs: Sequence[TileSpec],
        give: Callable[[TileSpec, Callable[[], Tile]], None],
    ) -> None:
        """As :meth:`prefill_next`, telling of rows as :meth:`engine.Generation.prefill_giving`."""
        start = self.position
        self.generation.prefill_giving(self.token_ids[start : start + call_tokens], specs, give)

    def decode_next(self) -> Decoded:
        """The boundary call: compute the last known token alone, and choose the next one.

        Raises:
            SessionStateError: Nothing is known, or a backlog is left.
        """
        if not self.token_ids or self.position != self.next_index - 1:
            raise SessionStateError(
                f"{self.next_index} tokens are known and {self.position} computed: "
                "there is no single next call"
            )
        logits = self.generation.step(self.token_ids[-1])
        token_id, sampler = _choose(self.decoding.sampler, logits)
        self.decoding = dataclasses.replace(self.decoding, sampler=sampler)
        self._last = Decoded(self.next_index, token_id, logits)
        self.token_ids.append(token_id)
        return self._last

    def recall(self, index: int) -> Decoded:
        """The known token at ``index``, with its logits if it was the last one generated here."""
        if self._last is not None and self._last.index == index:
            return self._last
        return Decoded(index, self.token_ids[index], None)


def _choose(sampler: SamplerState, logits: Logits) -> tuple[int, SamplerState]:
    parameters = sampler.parameters
    if parameters.temperature == 0 and not parameters.history_tokens and not parameters.logit_bias:
        # The same token, without a copy of all logits.
        return logits.argmax(), sampler
    return sampler.choose(logits)
