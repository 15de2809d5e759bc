"""Which proposed tokens stay: the rejection rule, as a function of its inputs.

Leviathan, Kalman and Matias (2023): a token that the draft drew from ``q`` stays with probability
``min(1, p / q)``, ``p`` being the target's distribution at its place. At the first that does not, a
token is drawn from ``max(0, p - q)``, renormalised; where all stay, one more from the target. What
comes out is distributed as if the target alone had been sampled, whatever the draft says.

A lookup's ``q`` is a certainty. Where a greedy target's ``p`` is one too, the rule says "keep what
is equal" and takes no random number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.draft import Proposal
from engine.logits import Logits
from engine.sampling import Distribution
from engine.sampling_state import SamplerState
from kvpack.errors import LimitError


@dataclass(frozen=True, slots=True, repr=False)
class Verdict:
    """What a block is worth.

    Attributes:
        token_ids: The new tokens: those that stayed, and the one the target chose after them. As
            many of the block's rows stay, for the block begins with the token before these.
        accepted_tokens: How many of them the draft had proposed.
        sampler: The state after the last of them.
    """

    token_ids: tuple[int, ...]
    accepted_tokens: int
    sampler: SamplerState

    def __repr__(self) -> str:
        return f"Verdict({len(self.token_ids)} tokens, {self.accepted_tokens} accepted)"


def verify(
    proposal: Proposal,
    logits: Sequence[Logits],
    sampler: SamplerState,
    stop_ids: Collection[int] = (),
) -> Verdict:
    """Judge a proposal by the target's logits.

    Args:
        proposal: What the draft said.
        logits: The target's logits after the boundary token and after each proposed token.
        sampler: The state before the round; its stream goes on where the draft's draws ended.
        stop_ids: Tokens that end the text. Nothing stays after the first of them, and like every
            last token it is not in the cache yet.

    Raises:
        LimitError: Not one more set of logits than tokens, or logits without a largest value.
    """
    count = len(proposal.token_ids)
    if len(logits) != count + 1:
        raise LimitError("block.logits", f"{count + 1} positions", len(logits))
    state = dataclasses.replace(sampler, stream=proposal.stream)
    tokens: list[int] = []
    for index, token in enumerate(proposal.token_ids):
        target, draft = state.distribution(logits[index]), proposal.distributions[index]
        stays, state = _stays(token, target, draft, state)
        if not stays:
            chosen, state = state.draw(target.without(draft))
            return Verdict((*tokens, chosen), index, state)
        state = state.observe((token,))
        tokens.append(token)
        if token in stop_ids:
            return Verdict(tuple(tokens), index + 1, state)
    chosen, state = state.choose(logits[count])
    return Verdict((*tokens, chosen), count, state)


def _stays(
    token: int, target: Distribution, draft: Distribution, state: SamplerState
) -> tuple[bool, SamplerState]:
    """Whether ``token``, drawn from ``draft``, stays; a greedy target takes no random number."""
    if target.only_token is not None:
        return token == target.only_token, state
    uniform, state = state.uniform()
    return uniform * draft.probability(token) < target.probability(token), state
