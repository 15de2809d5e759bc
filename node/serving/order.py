"""What is asked of the slots, and what comes back: values alone.

An order holds the whole context as token ids. How much of it has to be computed is not the order's
matter: whoever runs it begins from the deepest state that is held, and says in the end which.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvpack.limits import POSITION_MAX, check_range

if TYPE_CHECKING:
    from engine import DecodingState
    from node.directory import OwnershipToken

#: Alternatives to one token that may be asked for: what public APIs accept.
TOP_LOGPROBS_MAX: Final = 20


class Rung(enum.Enum):
    """Where the rows that an answer began from were held, nearest first."""

    CURRENT = "current"  # the live state of the session or slot that goes on
    RESIDENT = "resident"  # in memory
    DURABLE = "durable"  # in the store on disk
    REMOTE = "remote"  # a producer node computed them for this request
    NONE = "none"


class MissReason(enum.Enum):
    """Why not the whole prefix was held."""

    NONE = "none"  # nothing was missed but new tokens
    COLD = "cold"  # nothing that this prompt begins with was ever kept
    INPUT_CHANGED = "input_changed"  # the kept text differs from the prompt further on
    WINDOW_COLLECTED = "window_collected"  # rows were kept, the window at that place was not
    DAMAGED = "damaged"  # a cut was there and could not be proved
    NUMERICS_CHANGED = "numerics_changed"  # another build computed it
    CONTEXT_SHIFTED = "context_shifted"  # older turns were dropped, so all rows moved
    DISABLED = "disabled"  # the request or the node asked for no reuse


class Fallback(enum.Enum):
    """Why a prompt that a producer node should have computed was computed here."""

    NONE = "none"  # it was not to be, or it was
    AWAY = "away"  # nobody answered
    SLOW = "slow"  # it answered and then made no progress for too long
    BROKEN = "broken"  # it went away in the middle, or what it sent did not hold
    MODEL = "model"  # it has another model, tokenizer or shape of rows
    REFUSED = "refused"  # it does not work for this node
    BUSY = "busy"  # as many remote prefills as may be are under way
    RESTING = "resting"  # it failed a moment ago and is not asked again yet


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # as many tokens as asked for, or the context is full


@dataclass(frozen=True, slots=True)
class SessionRef:
    """A session that this node owns, for an order that goes on in it.

    Attributes:
        session_id: Its name.
        token: What the caller believes that this node owns it by.
        rebuild: Its known tokens are not a prefix of the order's: compute the order's in a
            staging generation and swap it in, which advances the context epoch.
    """

    session_id: str
    token: OwnershipToken
    rebuild: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class RunOrder:
    """One answer to be generated.

    Attributes:
        tenant: Whose rows may be begun from, and whose cuts are kept.
        token_ids: The whole context, the last one the boundary token. The user's text.
        decoding: How tokens are chosen and where text stops, before the first choice.
        max_tokens: Tokens to generate at most.
        end_ids: Token ids that end the answer. The one that ends it is known, but is no text.
        top_logprobs: Alternatives to report for each token; None: no logprobs at all.
        session: The owned session that goes on; None: a state of its own.
        reuse: Whether kept rows may be begun from.
        keep: Whether cuts of this answer are kept.
        shifted: Older turns were dropped from what was known of it, so its rows moved.
        priority: Lower is sooner among those that wait; ties in order of arrival.

    Raises:
        LimitError: A field is outside its range.
    """

    tenant: str
    token_ids: tuple[int, ...]
    decoding: DecodingState
    max_tokens: int
    end_ids: frozenset[int] = field(default_factory=frozenset)
    top_logprobs: int | None = None
    session: SessionRef | None = None
    reuse: bool = True
    keep: bool = True
    shifted: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        check_range("token_ids", len(self.token_ids), 1, POSITION_MAX, "tokens")
        check_range("max_tokens", self.max_tokens, 1, POSITION_MAX, "tokens")
        if self.top_logprobs is not None:
            check_range("top_logprobs", self.top_logprobs, 0, TOP_LOGPROBS_MAX)

    def __repr__(self) -> str:
        return f"RunOrder({len(self.token_ids)} tokens, at most {self.max_tokens} more)"


@dataclass(frozen=True, slots=True)
class Prefilled:
    """So many of the prompt's tokens stand in the planes.

    Attributes:
        computed_tokens: Restored ones included.
        total_tokens: Of the prompt.
    """

    computed_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, repr=False)
class TokenLogprob:
    """A token and its natural logarithm of probability, before any sampling parameter.

    Attributes:
        token_id: Which.
        logprob: ``log softmax(logits)[token_id]``.
        top: The most probable tokens with theirs, most probable first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Piece:
    """One generated token, and the text that it decided.

    Attributes:
        index: The token's position in the session.
        token_id: The token.
        text: What is decided by now; empty while a character or a stop string may be half here.
        logprob: If it was asked for.
    """

    index: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RunUsage:
    """What an answer took.

    Attributes:
        prompt_tokens: Of the whole context, cached or not.
        completion_tokens: Generated, the end token included.
        cached_tokens: Of the prompt, those whose rows were begun from.
        evaluated_tokens: Of the prompt, those computed for this answer.
        rung: Where the cached ones were held.
        miss: Why not all were.
        restored_bytes: Plaintext of rows brought back for it, from the manifest.
        queued_s: Seconds until a slot was free.
        first_token_s: Seconds from submission to the first token.
        fallback: Why no producer computed the prompt, where one should have.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    rung: Rung
    miss: MissReason
    restored_bytes: int
    queued_s: float
    first_token_s: float
    fallback: Fallback = Fallback.NONE


@dataclass(frozen=True, slots=True, repr=False)
class Finished:
    """The last event of an answer.

    Attributes:
        reason: Why it ended.
        text: The rest of the text, which nothing can change any more.
        token_ids: The whole context with all generated tokens: what a next turn begins with.
        usage: What it took.
    """

    reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    usage: RunUsage


RunEvent = Prefilled | Piece | Finished
