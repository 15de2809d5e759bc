"""Context policy: what of a conversation or prompt goes into a context of limited size.

Pure functions from messages and token counts to a plan or to a refusal that names what does not
fit. Nothing is shortened inside of a turn; the room for the answer is never touched. A plan says
what is kept; the kept text is then computed anew, since rows are bound to their positions.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvpack.limits import POSITION_MAX, check_range
from node.chat.messages import Messages
from node.chat.turns import Conversation


class Policy(enum.Enum):
    """What happens to a conversation that is longer than the context."""

    SHIFT = "shift"  # its oldest turns are dropped
    ERROR = "error"  # it is refused


@dataclass(frozen=True, slots=True)
class Budget:
    """Room for one answer and what it follows, in tokens.

    Attributes:
        limit_tokens: What the context holds.
        reserve_tokens: Of it, what is kept free for the answer.
        policy: What happens to what is longer.
        step_tokens: Turns are dropped in steps of at least so many tokens, as far as the newest
            turn allows; 0: no more than needed. A shift computes everything anew, and in steps
            the next turns begin with the same text until the next step.

    Raises:
        LimitError: A number is out of range.
    """

    limit_tokens: int
    reserve_tokens: int
    policy: Policy = Policy.SHIFT
    step_tokens: int = 0

    def __post_init__(self) -> None:
        check_range("limit_tokens", self.limit_tokens, 1, POSITION_MAX, "tokens")
        check_range("reserve_tokens", self.reserve_tokens, 0, POSITION_MAX, "tokens")
        check_range("step_tokens", self.step_tokens, 0, POSITION_MAX, "tokens")

    @property
    def room(self) -> int:
        """What is left for the prompt; not above 0 where the reserve takes everything."""
        return self.limit_tokens - self.reserve_tokens

    def kept_at_most(self, prompt_tokens: int) -> int:
        """What may be left of a prompt that is longer than the room: whole steps are dropped."""
        excess, step = prompt_tokens - self.room, max(1, self.step_tokens)
        return prompt_tokens - -(-excess // step) * step


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What is kept.

    Attributes:
        messages: Leading system content and the newest turns, whole.
        dropped_turns: How many of the oldest are left out.
        dropped_messages: Their messages.
        prompt_tokens: What the kept ones take.
    """

    messages: Messages
    dropped_turns: int
    dropped_messages: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing is kept.

    Attributes:
        text: What does not fit, in numbers; none of the user's text.
        limit_tokens: What the context holds.
        needed_tokens: What the smallest form of it takes, the reserve included.
    """

    text: str
    limit_tokens: int
    needed_tokens: int


def plan(
    conversation: Conversation, counts: Sequence[int], leading_tokens: int, budget: Budget
) -> Plan | Refusal:
    """What of ``conversation`` is kept under ``budget``.

    A system message after the first turn refuses a shift: it may speak of what would be dropped,
    and is neither leading content nor part of a turn. Where nothing has to be dropped it may stay.

    Args:
        conversation: Leading system content and turns.
        counts: For each number of dropped turns, from none to all but the newest, the tokens of
            the whole prompt that is left; not ascending. Looked at in a few places only, so it
            may be a sequence that counts when asked.
        leading_tokens: Of these, what the leading system content takes; for the text of a refusal.
        budget: The room.
    """
    if budget.room < 1:
        return _no_room(budget)
    whole = counts[0]
    if whole <= budget.room:
        return _keep(conversation, counts, 0)
    if budget.policy is Policy.ERROR:
        return _too_long(whole, budget)
    late = conversation.late_system_message()
    if late is not None:
        return _late_system(late, whole, budget)
    newest = max(0, len(conversation.turns) - 1)
    if counts[newest] > budget.room:
        return _newest_too_long(conversation, counts[newest], leading_tokens, budget)
    dropped = _first_that_fits(counts, newest, budget.kept_at_most(whole))
    # Where a template makes counts ascend, the search may miss; the newest turn is known to fit.
    return _keep(conversation, counts, dropped if counts[dropped] <= budget.room else newest)


def _first_that_fits(counts: Sequence[int], newest: int, room: int) -> int:
    """The fewest turns to drop so that ``room`` is enough; ``newest`` where it never is."""
    return bisect.bisect_left(counts, -room, 0, newest, key=lambda count: -count)


def _keep(conversation: Conversation, counts: Sequence[int], dropped: int) -> Plan:
    messages = sum(len(turn) for turn in conversation.turns[:dropped])
    return Plan(conversation.without(dropped), dropped, messages, counts[dropped])


def _no_room(budget: Budget) -> Refusal:
    text = (
        f"the context holds {budget.limit_tokens} tokens; the answer's reserve of "
        f"{budget.reserve_tokens} leaves no room for a prompt"
    )
    return Refusal(text, budget.limit_tokens, budget.reserve_tokens + 1)


def _too_long(prompt_tokens: int, budget: Budget) -> Refusal:
    text = (
        f"the context holds {budget.limit_tokens} tokens; the messages take {prompt_tokens} and "
        f"{budget.reserve_tokens} are reserved for the answer"
    )
    return Refusal(text, budget.limit_tokens, prompt_tokens + budget.reserve_tokens)


def _late_system(index: int, prompt_tokens: int, budget: Budget) -> Refusal:
    whole = _too_long(prompt_tokens, budget)
    text = (
        f"{whole.text}; older turns cannot be dropped, since messages[{index}] is a system "
        "message after the first turn"
    )
    return Refusal(text, whole.limit_tokens, whole.needed_tokens)


def _newest_too_long(
    conversation: Conversation, prompt_tokens: int, leading_tokens: int, budget: Budget
) -> Refusal:
    dropped = sum(len(turn) for turn in conversation.turns[:-1])
    first = len(conversation.leading) + dropped
    last = first + len(conversation.turns[-1]) - 1 if conversation.turns else first
    leading = min(leading_tokens, prompt_tokens)
    parts = [f"the newest turn (messages[{first}] to [{last}]) takes {prompt_tokens - leading}"]
    if conversation.leading:
        parts.insert(0, f"the leading system content takes {leading}")
    text = (
        f"the context holds {budget.limit_tokens} tokens; {', '.join(parts)} and "
        f"{budget.reserve_tokens} are reserved for the answer: what is always kept does not fit"
    )
    return Refusal(text, budget.limit_tokens, prompt_tokens + budget.reserve_tokens)


@dataclass(frozen=True, slots=True)
class RawPlan:
    """What of a prompt without messages is kept, as ranges of its tokens.

    Attributes:
        prefix_tokens: The first ones.
        suffix_first: From here to the end; equal to ``prefix_tokens`` where all are kept.
        prompt_tokens: How many these are.
    """

    prefix_tokens: int
    suffix_first: int
    prompt_tokens: int

    def take(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The kept ones of ``token_ids``."""
        return (*token_ids[: self.prefix_tokens], *token_ids[self.suffix_first :])


def plan_raw(prompt_tokens: int, prefix_tokens: int, budget: Budget) -> RawPlan | Refusal:
    """What of a prompt of token ids is kept: a prefix of fixed length, and the newest suffix.

    Args:
        prompt_tokens: Its length, at least one.
        prefix_tokens: How many of the first are always kept.
        budget: The room.

    Raises:
        LimitError: A number is out of range.
    """
    check_range("prompt_tokens", prompt_tokens, 1, POSITION_MAX, "tokens")
    check_range("prefix_tokens", prefix_tokens, 0, POSITION_MAX, "tokens")
    if budget.room < 1:
        return _no_room(budget)
    if prompt_tokens <= budget.room:
        return RawPlan(
            min(prefix_tokens, prompt_tokens), min(prefix_tokens, prompt_tokens), prompt_tokens
        )
    whole = f"the context holds {budget.limit_tokens} tokens; the prompt takes {prompt_tokens}"
    reserved = f"{budget.reserve_tokens} are reserved for the answer"
    needed = prompt_tokens + budget.reserve_tokens
    if budget.policy is Policy.ERROR:
        return Refusal(f"{whole} and {reserved}", budget.limit_tokens, needed)
    if prefix_tokens >= budget.room:
        text = f"{whole}, {reserved}, and the prefix of {prefix_tokens} leaves no room for its end"
        return Refusal(text, budget.limit_tokens, prefix_tokens + 1 + budget.reserve_tokens)
    suffix = max(1, budget.kept_at_most(prompt_tokens) - prefix_tokens)
    return RawPlan(prefix_tokens, prompt_tokens - suffix, prefix_tokens + suffix)


@dataclass(frozen=True, slots=True, repr=False)
class Lineage:
    """A conversation that goes on from what was retained of it.

    Attributes:
        dropped_messages: Between the leading system content and the retained turns.
        new_messages: What follows the retained ones; may be empty.
    """

    dropped_messages: int
    new_messages: Messages


def lineage(retained: Messages, incoming: Messages) -> Lineage | None:
    """How ``incoming`` goes on from ``retained``; None where it does not.

    It does where both begin with the same system content and the retained turns appear in
    ``incoming`` as one exact run that begins with a turn. Where they appear more than once, as
    equal turns do, the last run counts: it leaves the least to be computed.
    """
    old, new = Conversation.of(retained), Conversation.of(incoming)
    if old.leading != new.leading:
        return None
    run = retained[len(old.leading) :]
    rest = incoming[len(new.leading) :]
    starts = [0]
    for turn in new.turns:
        starts.append(starts[-1] + len(turn))
    for start in reversed(starts):
        if rest[start : start + len(run)] == run and (run or start == 0):
            return Lineage(start, rest[start + len(run) :])
    return None
