"""The speculative loop: propose, compute a block, keep what the target would have said itself.

A round begins with the boundary token known and not computed, as every single-token call does, and
ends that way: ``n`` tokens further, ``n`` rows further, draft and target at the same position. Its
one commit point is the target's checkpoint, which is accepted last; whatever is raised before that
leaves target and sampler as they were, and a draft that is there again with the next round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from engine.draft import DRAFT_TOKENS_MAX, Draft, Proposal
from engine.generation import Generation
from engine.logits import Logits
from engine.sampling_state import SamplerState
from engine.speculative_rule import Verdict, verify
from kvpack.errors import LayoutMismatchError
from kvpack.limits import POSITION_MAX, SCHEDULE_RUNS_MAX, check_range

#: Blocks that drop rows rarely repeat, so each may take a run of the schedule. Speculation leaves
#: these to turns to come, and then decodes plainly, which takes one run for all of its calls.
SCHEDULE_RUNS_LEFT: Final = 8192


@dataclass(frozen=True, slots=True)
class LivePair:
    """A session's cache and its draft's, which are swapped together or not at all.

    The owner holds one of these and replaces it by one assignment.

    Attributes:
        target: The session's cache.
        draft: The draft model's, None where it has to be computed anew.

    Raises:
        LayoutMismatchError: They stand at different positions.
    """

    target: Generation
    draft: Generation | None = None

    def __post_init__(self) -> None:
        if self.draft is not None and self.draft.position != self.target.position:
            expected, found = self.target.position, self.draft.position
            raise LayoutMismatchError("draft.position", expected, found)


@dataclass(frozen=True, slots=True, repr=False)
class Round:
    """What one round brought.

    Attributes:
        token_ids: New tokens, at least one; the last is the boundary token of the next round.
        proposed_tokens: How many the draft proposed.
        accepted_tokens: How many of those stayed.
        sampler: The state after the last token.
        logits: The target's logits from which the last token was taken.
    """

    token_ids: tuple[int, ...]
    proposed_tokens: int
    accepted_tokens: int
    sampler: SamplerState
    logits: Logits

    def __repr__(self) -> str:
        return f"Round({len(self.token_ids)} tokens, {self.accepted_tokens} accepted)"


def speculate(
    target: Generation,
    draft: Draft,
    token_ids: Sequence[int],
    sampler: SamplerState,
    *,
    draft_tokens: int,
    tokens_max: int = POSITION_MAX,
    stop_ids: Collection[int] = (),
) -> Round:
    """One round.

    Args:
        target: Stands before the last of ``token_ids``.
        draft: Proposes.
        token_ids: All tokens known, the boundary token last.
        sampler: How tokens are chosen.
        draft_tokens: Tokens to propose, at most 15; 0 makes the round a plain step.
        tokens_max: The round brings no more tokens than this.
        stop_ids: Tokens that end the text.

    Raises:
        LimitError: A number is outside its cap, or logits that nothing can be drawn from.
        LayoutMismatchError: ``target`` does not stand before the last token.
        ContextLimitError: The context is full.
        TornGenerationError: An earlier call stopped half way.
    """
    if len(token_ids) != target.position + 1:
        raise LayoutMismatchError("token_ids", f"{target.position + 1} ids", len(token_ids))
    check_range("draft.tokens", draft_tokens, 0, DRAFT_TOKENS_MAX, "tokens")
    check_range("round.tokens_max", tokens_max, 1, POSITION_MAX, "tokens")
    count = min(_proposable(target, draft_tokens), tokens_max - 1)
    draft.catch_up(token_ids)
    committed = False
    try:
        proposal = draft.propose(token_ids, count, sampler)
        verdict, logits = _judge(target, draft, token_ids[-1], proposal, sampler, stop_ids)
        committed = True
    finally:
        if not committed:
            draft.abandon()
    return Round(
        token_ids=verdict.token_ids,
        proposed_tokens=len(proposal.token_ids),
        accepted_tokens=verdict.accepted_tokens,
        sampler=verdict.sampler,
        logits=logits,
    )


def _judge(
    target: Generation,
    draft: Draft,
    boundary: int,
    proposal: Proposal,
    sampler: SamplerState,
    stop_ids: Collection[int],
) -> tuple[Verdict, Logits]:
    """Compute the block, keep what stays, and bring the draft to the same position."""
    block = (boundary, *proposal.token_ids)
    with target.checkpoint(len(block)) as checkpoint:
        logits = target.block(block)
        verdict = verify(proposal, logits, sampler, stop_ids)
        kept = len(verdict.token_ids)
        draft.reach(kept)
        draft.accept(kept)
        checkpoint.accept(kept)
    return verdict, logits[kept - 1]


def _proposable(target: Generation, draft_tokens: int) -> int:
    """How many tokens a block may hold beside the boundary token."""
    if len(target.schedule.runs) > SCHEDULE_RUNS_MAX - SCHEDULE_RUNS_LEFT:
        return 0
    room = target.layout.max_context_tokens - target.position - 1
    return max(0, min(draft_tokens, room))


def speculative_rounds(
    target: Generation,
    draft: Draft,
    token_ids: Sequence[int],
    sampler: SamplerState,
    *,
    draft_tokens: int,
    tokens_max: int,
    stop_ids: Collection[int] = (),
) -> Iterator[Round]:
    """Rounds until ``tokens_max`` tokens came, one of ``stop_ids`` did, or the context is full.

    Between two rounds the target may be snapshotted: it holds accepted tokens only.

    Raises:
        As :func:`speculate`.
    """
    known, left = list(token_ids), tokens_max
    while left > 0 and target.position < target.layout.max_context_tokens:
        one = speculate(
            target, draft, known, sampler,
            draft_tokens=draft_tokens, tokens_max=left, stop_ids=stop_ids,
        )  # fmt: skip
        yield one
        known.extend(one.token_ids)
        sampler, left = one.sampler, left - len(one.token_ids)
        if one.token_ids[-1] in stop_ids:
            return
