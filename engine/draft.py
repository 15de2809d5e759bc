"""Who proposes the tokens of a speculative block: a small model, or the text itself.

A draft may be wrong, slow or lost; nothing of that changes what the target generates. It stands at
the target's position whenever a round begins and whenever one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from engine.checkpoint import BLOCK_TOKENS_MAX, Checkpoint
from engine.generation import Generation
from engine.model import Model
from engine.prefill import prefill_calls
from engine.sampling import Distribution
from engine.sampling_random import RandomStream
from engine.sampling_state import SamplerState
from kvpack.errors import IdentityMismatchError, LayoutMismatchError, LimitError
from kvpack.limits import check_range

#: Tokens of one proposal: the block holds the boundary token before them.
DRAFT_TOKENS_MAX: Final = BLOCK_TOKENS_MAX - 1

#: Longest n-gram that a lookup compares; longer ones find nothing that shorter ones do not.
NGRAM_TOKENS_MAX: Final = 16

#: Most tokens that a lookup searches, so that a round costs the same in any context.
LOOKUP_TOKENS_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True, repr=False)
class Proposal:
    """Tokens that may come next, and how likely the draft was to say each.

    Attributes:
        token_ids: The proposed tokens, in order.
        distributions: What each was drawn from.
        stream: The random stream after the draws.

    Raises:
        LimitError: More tokens than a block has room for, or not one distribution for each.
    """

    token_ids: tuple[int, ...]
    distributions: tuple[Distribution, ...]
    stream: RandomStream

    def __post_init__(self) -> None:
        check_range("proposal.tokens", len(self.token_ids), 0, DRAFT_TOKENS_MAX, "tokens")
        if len(self.distributions) != len(self.token_ids):
            expected = f"{len(self.token_ids)} entries"
            raise LimitError("proposal.distributions", expected, len(self.distributions))

    def __repr__(self) -> str:
        return f"Proposal({len(self.token_ids)} tokens)"


class Draft(Protocol):
    """What a round asks of a draft, in this order; ``abandon`` ends a round that failed."""

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Stand before the last of ``token_ids``, the boundary token."""

    def propose(self, token_ids: Sequence[int], count: int, sampler: SamplerState) -> Proposal:
        """Up to ``count`` tokens that may follow ``token_ids``."""

    def reach(self, kept_tokens: int) -> None:
        """Compute what is missing to keep ``kept_tokens`` tokens from the boundary token on."""

    def accept(self, kept_tokens: int) -> None:
        """Keep them and undo the rest."""

    def abandon(self) -> None:
        """Undo the round; harmless where none is open."""


def check_draft(target: Model, draft: Model) -> None:
    """Refuse a draft model whose tokens are not the target's.

    Raises:
        IdentityMismatchError: The tokenizers differ.
        LayoutMismatchError: The vocabularies differ in size, or the draft's context is shorter.
    """
    ours = target.identity("draft").tokenizer_digest
    theirs = draft.identity("draft").tokenizer_digest
    if ours != theirs:
        raise IdentityMismatchError("draft.tokenizer_digest", ours.hex()[:16], theirs.hex()[:16])
    if target.vocab_size != draft.vocab_size:
        raise LayoutMismatchError("draft.vocab_size", target.vocab_size, draft.vocab_size)
    needed, found = target.layout.max_context_tokens, draft.layout.max_context_tokens
    if found < needed:
        raise LayoutMismatchError("draft.max_context_tokens", f">= {needed}", found)


class ModelDraft:
    """A draft model and its own cache.

    It proposes by single-token calls under a checkpoint. Having said ``m`` tokens it has seen one
    fewer of them, so where all are accepted it computes the last one too: without that step it
    would fall behind by one token each time, and its guesses would quietly get worse.
    """

    __slots__ = ("_checkpoint", "_generation", "_make_generation", "_tokens")

    def __init__(
        self, make_generation: Callable[[], Generation], generation: Generation | None = None
    ) -> None:
        """Draft with ``generation``, or from nothing where there is none.

        Args:
            make_generation: An empty generation of the draft model, to begin again with.
            generation: The draft's cache so far.
        """
        self._make_generation = make_generation
        self._generation = generation or make_generation()
        self._checkpoint: Checkpoint | None = None
        self._tokens: list[int] = []

    @property
    def generation(self) -> Generation:
        """The draft's cache. Another one after the draft had to begin again."""
        return self._generation

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Compute what the draft has not seen of ``token_ids`` but the last; nothing in a round.

        This is also how a draft comes to a session that was restored without one.
        """
        wanted = len(token_ids) - 1
        if self._generation.position > wanted:
            # It cannot be rewound to a place that nobody marked.
            self._generation = self._make_generation()
        complete = False
        try:
            self._compute(token_ids[:wanted])
            complete = True
        finally:
            if not complete:
                # A call that stopped half way cannot be gone on from.
                self._generation = self._make_generation()

    def _compute(self, token_ids: Sequence[int]) -> None:
        done = self._generation.position
        for call_tokens in prefill_calls(done, len(token_ids)):
            self._generation.prefill(token_ids[done : done + call_tokens])
            done += call_tokens

    def propose(self, token_ids: Sequence[int], count: int, sampler: SamplerState) -> Proposal:
        """``count`` tokens, each drawn by ``sampler`` from the draft model's logits.

        Raises:
            LimitError: More than 15.
            RuntimeError: The last round is still open.
        """
        check_range("draft.tokens", count, 0, DRAFT_TOKENS_MAX, "tokens")
        self._checkpoint = self._generation.checkpoint(count + 1)
        self._tokens = [token_ids[-1]]
        distributions = []
        for _ in range(count):
            choices = sampler.distribution(self._generation.step(self._tokens[-1]))
            token, sampler = sampler.draw(choices)
            self._tokens.append(token)
            distributions.append(choices)
        return Proposal(tuple(self._tokens[1:]), tuple(distributions), sampler.stream)

    def reach(self, kept_tokens: int) -> None:
        """Compute the tokens up to ``kept_tokens`` that proposing did not need: at most one."""
        for token in self._tokens[self._open().computed_tokens : kept_tokens]:
            self._generation.step(token)

    def accept(self, kept_tokens: int) -> None:
        """Keep ``kept_tokens`` tokens from the boundary token on.

        Raises:
            LimitError: More than were computed.
            RuntimeError: No round is open.
        """
        self._open().accept(kept_tokens)
        self._checkpoint = None

    def abandon(self) -> None:
        """Undo the open round, or one that was accepted here while the target took its own back."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None and checkpoint.is_open:
            checkpoint.roll_back()
        else:
            self._generation = self._make_generation()

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            raise RuntimeError("no round is open: propose first")
        return self._checkpoint


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Proposes what followed the last tokens when they occurred before. Keeps nothing.

    Attributes:
        ngram_max: Longest run of last tokens that is looked for; shorter ones when it is not found.
        ngram_min: Shortest.
        lookup_tokens: How many last tokens are searched.

    Raises:
        LimitError: A number is outside its cap.
    """

    ngram_max: int = 3
    ngram_min: int = 1
    lookup_tokens: int = 8192

    def __post_init__(self) -> None:
        check_range("lookup.ngram_min", self.ngram_min, 1, NGRAM_TOKENS_MAX, "tokens")
        check_range("lookup.ngram_max", self.ngram_max, self.ngram_min, NGRAM_TOKENS_MAX, "tokens")
        check_range("lookup.lookup_tokens", self.lookup_tokens, 2, LOOKUP_TOKENS_MAX, "tokens")

    def propose(self, token_ids: Sequence[int], count: int, sampler: SamplerState) -> Proposal:
        """What followed, as certainties: the draft had no other word to say.

        Raises:
            LimitError: More than 15.
        """
        check_range("draft.tokens", count, 0, DRAFT_TOKENS_MAX, "tokens")
        found = self._continuation(token_ids[-self.lookup_tokens :], count)
        return Proposal(found, tuple(map(Distribution.point, found)), sampler.stream)

    def _continuation(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        recent = np.array(token_ids, np.int64)
        for size in range(min(self.ngram_max, len(recent) - 1), self.ngram_min - 1, -1):
            # Candidates end before the last token, so that something follows each.
            windows = np.lib.stride_tricks.sliding_window_view(recent[:-1], size)
            after = np.flatnonzero((windows == recent[-size:]).all(axis=1)) + size
            if after.size:
                # The latest one that is followed by enough, else the one followed by most.
                enough = after[after + count <= len(recent)]
                first = int(enough[-1] if enough.size else after[0])
                return tuple(recent[first : first + count].tolist())
        return ()

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """A lookup has seen nothing and has nothing to see."""

    def reach(self, kept_tokens: int) -> None:
        """Nothing is computed."""

    def accept(self, kept_tokens: int) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        """Nothing is undone."""
