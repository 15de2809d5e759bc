"""From logits to a distribution over tokens: a function of its inputs, on the host.

Order of operations, and why. All arithmetic is IEEE double.

1. *Repetition penalty*: the logit of a token in the window is divided by it where positive and
   multiplied where not. It scales what the model said, so it comes before anything is added.
2. *Presence and frequency penalties*: subtracted once, and once per occurrence in the window.
3. *Logit bias*: added last, so that plus or minus 100 means "always" or "never", as users expect.
4. *Temperature*: logits minus their maximum, divided by it. At 0 the token with the largest logit
   has probability one, the lowest id among equals; steps 5 to 7 then have nothing to do.
5. *top_k*: the k most probable tokens stay.
6. *top_p*: of those, renormalised, the fewest most probable ones that reach top_p stay.
7. *min_p*: of those, tokens below min_p times the most probable one's share go.
8. What is left is renormalised.

Where probabilities are equal the lower id goes first, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpack.errors import LimitError
from kvpack.limits import TOKEN_ID_MAX, check_range

#: Longest history that penalties look at; it travels with the sampler.
PENALTY_WINDOW_TOKENS_MAX: Final = 4096

#: Entries of a logit bias: what public APIs accept, rounded up.
LOGIT_BIAS_ENTRIES_MAX: Final = 1024

#: Limits of the usual interfaces, or beyond what anybody sets.
TEMPERATURE_MAX: Final = 100.0
REPETITION_PENALTY_MAX: Final = 100.0
ADDED_PENALTY_MAX: Final = 100.0
LOGIT_BIAS_MAX: Final = 100.0

_Reals = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.intp]


def _check_real(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Refuse ``value`` unless ``low <= value <= high``; with ``above``, unless ``low < value``."""
    if not low <= value <= high or (above and value == low):
        shown = f"above {low} to {high}" if above else f"{low} to {high}"
        raise LimitError(f"sampling.{field}", shown, value)


@dataclass(frozen=True, slots=True, repr=False)
class SamplingParameters:
    """How tokens are chosen. The defaults sample the model's own distribution.

    Attributes:
        temperature: 0 is greedy.
        top_k: Tokens that stay; 0 keeps all.
        top_p: Probability mass that stays; 1 keeps all.
        min_p: Smallest share of the most probable token's probability; 0 keeps all.
        repetition_penalty: 1 is none.
        presence_penalty: 0 is none.
        frequency_penalty: 0 is none.
        penalty_window_tokens: The penalties look at that many last tokens, prompt included.
        logit_bias: ``(token id, what is added)``, ascending by id.

    Raises:
        LimitError: Names the parameter, its range and what was given.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window_tokens: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0.0, TEMPERATURE_MAX)
        check_range("sampling.top_k", self.top_k, 0, TOKEN_ID_MAX, "tokens")
        _check_real("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real(
            "repetition_penalty", self.repetition_penalty, 0.0, REPETITION_PENALTY_MAX, above=True
        )
        for field in ("presence_penalty", "frequency_penalty"):
            _check_real(field, getattr(self, field), -ADDED_PENALTY_MAX, ADDED_PENALTY_MAX)
        check_range(
            "sampling.penalty_window_tokens",
            self.penalty_window_tokens, 0, PENALTY_WINDOW_TOKENS_MAX, "tokens",
        )  # fmt: skip
        self._check_bias()

    def _check_bias(self) -> None:
        field = "sampling.logit_bias"
        check_range(field, len(self.logit_bias), 0, LOGIT_BIAS_ENTRIES_MAX, "entries")
        ids = [token for token, _ in self.logit_bias]
        for token, value in self.logit_bias:
            check_range(f"{field}.token_id", token, 0, TOKEN_ID_MAX)
            _check_real("logit_bias", value, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
        if ids != sorted(set(ids)):
            raise LimitError(field, "unique ids in ascending order", "another order")

    def __repr__(self) -> str:
        # A bias can spell a word.
        return f"SamplingParameters(temperature={self.temperature}, {len(self.logit_bias)} biases)"

    @property
    def history_tokens(self) -> int:
        """How many last tokens decide the next choice; 0 where no penalty is in force."""
        added = self.presence_penalty or self.frequency_penalty
        return self.penalty_window_tokens if added or self.repetition_penalty != 1.0 else 0


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Distribution:
    """Probabilities of the tokens that have any.

    Attributes:
        ids: ``[count]`` token ids, ascending.
        probabilities: ``[count]``, positive or zero, summing to one up to rounding.

    Raises:
        LimitError: No token, or shapes that differ.
    """

    ids: _Ids
    probabilities: _Reals

    def __post_init__(self) -> None:
        if not self.ids.size or self.ids.shape != self.probabilities.shape:
            raise LimitError("distribution", "at least one token", self.ids.size)

    def __repr__(self) -> str:
        return f"Distribution({self.ids.size} tokens)"

    @classmethod
    def point(cls, token_id: int) -> Distribution:
        """All mass on one token."""
        return cls(np.array([token_id], np.intp), np.ones(1))

    @property
    def only_token(self) -> int | None:
        """The token that has all mass, or None where several have some."""
        return int(self.ids[0]) if self.ids.size == 1 else None

    def probability(self, token_id: int) -> float:
        """Probability of one token."""
        index = int(np.searchsorted(self.ids, token_id))
        found = index < self.ids.size and int(self.ids[index]) == token_id
        return float(self.probabilities[index]) if found else 0.0

    def token_at(self, uniform: float) -> int:
        """The token whose interval holds ``uniform``, in [0, 1): intervals lie in id order."""
        edges = np.cumsum(self.probabilities)
        # The last edge is one only up to rounding, and a token of probability zero has no interval.
        index = int(np.searchsorted(edges, uniform * edges[-1], side="right"))
        last = int(np.flatnonzero(self.probabilities)[-1])
        return int(self.ids[min(index, last)])

    def without(self, other: Distribution) -> Distribution:
        """What is left of this one once ``other`` is taken off: ``max(0, p - q)``, renormalised.

        Where rounding leaves nothing the two are equal, and this one is returned.
        """
        taken = np.zeros_like(self.probabilities)
        index = np.minimum(np.searchsorted(other.ids, self.ids), other.ids.size - 1)
        same = other.ids[index] == self.ids
        taken[same] = other.probabilities[index[same]]
        left = np.maximum(self.probabilities - taken, 0.0)
        total = float(left.sum())
        return Distribution(self.ids, left / total) if total > 0.0 else self


def distribution(
    logits: npt.NDArray[np.floating[Any]], parameters: SamplingParameters, history: Sequence[int]
) -> Distribution:
    """The distribution that ``parameters`` make of ``logits``, ``[vocab_size]``.

    Args:
        logits: One per token id; minus infinity is never chosen.
        parameters: What is done to them.
        history: The tokens before, in order; only the last ``parameters.history_tokens`` count.

    Raises:
        LimitError: Logits that have no largest finite value, or an id outside the vocabulary.
    """
    values = _adjusted(logits.astype(np.float64), parameters, history)
    top = float(values.max())
    if not math.isfinite(top):
        raise LimitError("logits", "a largest finite value", top)
    if parameters.temperature == 0.0:
        return Distribution.point(int(np.argmax(values)))
    with np.errstate(over="ignore"):
        # A tiny temperature sends all but the largest to minus infinity, as it should.
        scaled = (values - top) / parameters.temperature
    ids = _most_probable(scaled, parameters.top_k)
    shares = np.exp(scaled[ids])
    kept = _within_mass(shares / shares.sum(), parameters.top_p)
    ids, shares = ids[kept], shares[kept]
    kept = shares >= parameters.min_p * shares.max()
    ids, shares = ids[kept], shares[kept]
    return Distribution(ids, shares / shares.sum())


def _adjusted(values: _Reals, parameters: SamplingParameters, history: Sequence[int]) -> _Reals:
    """Steps 1 to 3, in place."""
    window = parameters.history_tokens
    if window and history:
        ids, counts = np.unique(np.array(history[-window:], np.intp), return_counts=True)
        _require_known(ids, values.size)
        seen, penalty = values[ids], parameters.repetition_penalty
        seen = np.where(seen > 0.0, seen / penalty, seen * penalty)
        values[ids] = seen - parameters.presence_penalty - parameters.frequency_penalty * counts
    if parameters.logit_bias:
        biased = np.array([token for token, _ in parameters.logit_bias], np.intp)
        _require_known(biased, values.size)
        values[biased] += np.array([value for _, value in parameters.logit_bias])
    return values


def _require_known(ids: _Ids, vocab_size: int) -> None:
    if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
        raise LimitError("sampling.token_id", f"0 to {vocab_size - 1}", "an id outside")


def _most_probable(scaled: _Reals, count: int) -> _Ids:
    """Ids of the ``count`` largest, ascending; all of them for 0."""
    if not 0 < count < scaled.size:
        return np.arange(scaled.size)
    edge = np.partition(scaled, scaled.size - count)[scaled.size - count]
    above = np.flatnonzero(scaled > edge)
    level = np.flatnonzero(scaled == edge)[: count - above.size]
    return np.sort(np.concatenate([above, level]))


def _within_mass(probabilities: _Reals, mass: float) -> _Ids:
    """Indices, ascending, of the fewest most probable entries that reach ``mass``."""
    if mass >= 1.0:
        return np.arange(probabilities.size)
    # Entries below half of an equal share of the rest cannot be needed, even all together, and a
    # large vocabulary is nearly all such: they are not sorted.
    able = np.flatnonzero(probabilities >= 0.5 * (1.0 - mass) / probabilities.size)
    order = able[np.argsort(-probabilities[able], kind="stable")]
    reached = np.searchsorted(np.cumsum(probabilities[order]), mass, side="left")
    return np.sort(order[: int(reached) + 1])
