"""What speculation was worth, and how often it said what plain decoding says.

Bytes are promised against a twin that makes the same block calls. Tokens of a plain greedy run are
another matter: a block of n tokens and n single steps are different call shapes, kernels may give
other bits for them, and a near tie may fall the other way. That equality is counted, not claimed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.generation import Generation
from engine.sampling_state import SamplerState
from engine.speculative import Round


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Sums over rounds.

    Attributes:
        rounds: Block calls of the target.
        proposed_tokens: Tokens that drafts proposed.
        accepted_tokens: Tokens of those that stayed.
        new_tokens: Tokens that came out.
    """

    rounds: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    new_tokens: int = 0

    @classmethod
    def of(cls, rounds: Iterable[Round]) -> SpeculationCounts:
        """The sums over ``rounds``."""
        counts = cls()
        for one in rounds:
            counts = cls(
                counts.rounds + 1,
                counts.proposed_tokens + one.proposed_tokens,
                counts.accepted_tokens + one.accepted_tokens,
                counts.new_tokens + len(one.token_ids),
            )
        return counts

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that stayed; 1 where none were proposed."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 1.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two token streams are equal, place by place.

    Attributes:
        compared: Places that both have.
        equal: Places with the same token.
        first_difference: The first place with another token, None where there is none.
    """

    compared: int
    equal: int
    first_difference: int | None

    @classmethod
    def between(cls, left: Sequence[int], right: Sequence[int]) -> Agreement:
        """Compare two streams as far as the shorter one goes."""
        same = [a == b for a, b in zip(left, right, strict=False)]
        return cls(len(same), sum(same), same.index(False) if False in same else None)

    @property
    def rate(self) -> float:
        """Share of equal places; 1 where there is none to compare."""
        return self.equal / self.compared if self.compared else 1.0


def plain_tokens(
    generation: Generation,
    boundary: int,
    sampler: SamplerState,
    *,
    tokens_max: int,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """The tokens that single-token calls bring, for comparison.

    Raises:
        LimitError: Logits that nothing can be drawn from.
        TornGenerationError: An earlier call stopped half way.
    """
    tokens: list[int] = []
    token = boundary
    room = generation.layout.max_context_tokens - generation.position
    for _ in range(min(tokens_max, room)):
        token, sampler = sampler.choose(generation.step(token))
        tokens.append(token)
        if token in stop_ids:
            break
    return tokens
