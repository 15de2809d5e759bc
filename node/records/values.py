"""Values of the records: what is kept of an answer, and of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpack import limits
from node.session import check_session_id
from node.state import MESSAGE_BYTES_MAX, MESSAGES_MAX

TENANT_CHARS_MAX: Final = 100

#: A whole answer as JSON: a long answer with its logprobs is far below.
BODY_BYTES_MAX: Final = 8 << 20
METADATA_BYTES_MAX: Final = 64 << 10

#: All messages of one context, those that a policy dropped among them.
CONTEXT_BYTES_MAX: Final = 8 << 20
DIGEST_BYTES: Final = 32
KEY_CHARS_MAX: Final = 255

_COUNTER_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept for each tenant. What is older than that goes first.

    Attributes:
        responses: Responses of one tenant.
        bytes: Of them and their contexts together.
        conversations: Conversations of one tenant. None goes by itself: a new one is refused.
        answers: Answers kept for retries, of one tenant.
        answer_bytes: Of them together.
        answer_s: How long one is kept, in seconds.
        transcripts: Transcripts of one tenant.
        transcript_bytes: Of them together.
    """

    responses: int = 4096
    bytes: int = 256 << 20
    conversations: int = 64
    answers: int = 1024
    answer_bytes: int = 64 << 20
    answer_s: int = 86_400
    transcripts: int = 1024
    transcript_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("responses", "conversations", "answers", "transcripts"):
            limits.check_range(f"records.{name}", getattr(self, name), 1, 1 << 20)
        limits.check_range("records.answer_s", self.answer_s, 1, 1 << 30, "seconds")
        for name in ("bytes", "answer_bytes", "transcript_bytes"):
            limits.check_range(f"records.{name}", getattr(self, name), 1, 1 << 40, "bytes")


@dataclass(frozen=True, slots=True, repr=False)
class Context:
    """A conversation so far, and the exact tokens that its kept part became.

    Attributes:
        messages: All of them, oldest first, one canonical JSON object each. The user's text.
        lead: How many of the first ones are system content, which is never dropped.
        kept_from: The first message after them that the tokens still stand for.
        token_ids: What was fed and generated: the kept messages, and before them what belonged to
            one answer alone, such as its instructions. The user's text.

    Raises:
        LimitError: A field is outside its range.
    """

    messages: tuple[bytes, ...] = ()
    lead: int = 0
    kept_from: int = 0
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.messages)
        limits.check_range("context.messages", count, 0, MESSAGES_MAX, "messages")
        for message in self.messages:
            limits.check_range("context.messages", len(message), 1, MESSAGE_BYTES_MAX, "bytes")
        total = sum(map(len, self.messages))
        limits.check_range("context.messages", total, 0, CONTEXT_BYTES_MAX, "bytes")
        limits.check_range("context.lead", self.lead, 0, count)
        limits.check_range("context.kept_from", self.kept_from, self.lead, count)
        limits.check_range(
            "context.token_ids", len(self.token_ids), 0, limits.POSITION_MAX, "tokens"
        )

    def __repr__(self) -> str:
        return f"Context({len(self.messages)} messages, {len(self.token_ids)} tokens)"

    @property
    def kept(self) -> tuple[bytes, ...]:
        """The messages that the tokens stand for."""
        return (*self.messages[: self.lead], *self.messages[self.kept_from :])

    @property
    def dropped(self) -> int:
        """How many messages a context policy has left out."""
        return self.kept_from - self.lead


@dataclass(frozen=True, slots=True, repr=False)
class ResponseRecord:
    """One stored answer: an immutable point that any number of later ones may begin from.

    Attributes:
        tenant: Whose.
        response_id: Its name.
        created_at: Seconds since 1970.
        body: The answer as it was given, JSON. The user's text.
        input_items: What it was asked, a JSON list. The user's text.
        context: The conversation up to and with this answer.

    Raises:
        LimitError: A field is outside its range.
    """

    tenant: str
    response_id: str
    created_at: int
    body: bytes
    input_items: bytes
    context: Context

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        check_session_id(self.response_id)
        limits.check_range("response.created_at", self.created_at, 0, _COUNTER_MAX)
        limits.check_range("response.body", len(self.body), 1, BODY_BYTES_MAX, "bytes")
        limits.check_range("response.input", len(self.input_items), 1, BODY_BYTES_MAX, "bytes")

    def __repr__(self) -> str:
        return f"ResponseRecord({self.response_id!r}, {self.context!r})"


@dataclass(frozen=True, slots=True, repr=False)
class ConversationRecord:
    """One conversation as of its last whole change.

    Attributes:
        tenant: Whose.
        conversation_id: Its name, and its session's.
        created_at: Seconds since 1970.
        revision: How often it was changed.
        context_epoch: How often its context was rebuilt.
        metadata: The client's, a JSON object.
        context: The messages, and the tokens of the session.

    Raises:
        LimitError: A field is outside its range.
    """

    tenant: str
    conversation_id: str
    created_at: int
    revision: int = 0
    context_epoch: int = 0
    metadata: bytes = b"{}"
    context: Context = field(default_factory=Context)

    def __post_init__(self) -> None:
        check_tenant(self.tenant)
        check_session_id(self.conversation_id)
        for name in ("created_at", "revision", "context_epoch"):
            limits.check_range(f"conversation.{name}", getattr(self, name), 0, _COUNTER_MAX)
        high = METADATA_BYTES_MAX
        limits.check_range("conversation.metadata", len(self.metadata), 2, high, "bytes")

    def __repr__(self) -> str:
        name, revision = self.conversation_id, self.revision
        return f"ConversationRecord({name!r}, revision {revision}, {self.context!r})"


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """What a request with an ``Idempotency-Key`` was answered, for those that ask again.

    Attributes:
        key: The client's.
        digest: Of the request, 32 bytes: the same key with another request is a conflict.
        status: HTTP status.
        body: JSON. The user's text.

    Raises:
        LimitError: A field is outside its range.
    """

    key: str
    digest: bytes
    status: int
    body: bytes

    def __post_init__(self) -> None:
        limits.check_range("idempotency_key", len(self.key), 1, KEY_CHARS_MAX, "characters")
        size = DIGEST_BYTES
        limits.check_range("answer.digest", len(self.digest), size, size, "bytes")
        limits.check_range("answer.status", self.status, 100, 599)
        limits.check_range("answer.body", len(self.body), 0, BODY_BYTES_MAX, "bytes")

    def __repr__(self) -> str:
        return f"Answer({self.status}, {len(self.body)} bytes)"


def check_tenant(tenant: str) -> str:
    """Return ``tenant`` if it can be one.

    Raises:
        LimitError: It cannot.
    """
    limits.check_range("tenant", len(tenant), 1, TENANT_CHARS_MAX, "characters")
    return tenant


def size_of(context: Context, *others: Sequence[object]) -> int:
    """About how many bytes a row of these takes: what the bounds count."""
    messages = sum(len(message) + 4 for message in context.messages)
    sizes = messages + 4 * len(context.token_ids)
    return sizes + sum(len(other) for other in others) + 512
