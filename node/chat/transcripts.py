"""Exact token ids of conversations that clients send back as text.

A stateless client sends all messages every time, the model's answers among them. Encoded again
they may become other ids than those that were generated. So the ids are kept under a digest of the
messages, and the next request that begins with the same messages goes on from them.

The digest is keyed: who reads the table learns neither text nor whether two tenants said the same.
It covers tokenizer, template, its options and the tools, so ids of another model are never found.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvpack.identity import Identity
from kvpack.keys import EpochKey
from kvpack.limits import POSITION_MAX, check_range
from node.chat import fields
from node.chat.messages import Message, Messages, Role
from node.chat.render import Known
from node.chat.tools import Tool

DIGEST_BYTES: Final = 32
_PURPOSE: Final = "transcript"

#: How many answers back are asked for: an edit is rarely further away, and each is a look-up.
LOOKBACK_ANSWERS: Final = 32

#: What one entry takes in memory beside its ids, roughly.
_ENTRY_BYTES: Final = 256
_BYTES_PER_TOKEN: Final = 8


@dataclass(frozen=True, slots=True, repr=False)
class Transcript:
    """The exact ids of a conversation.

    Attributes:
        token_ids: All of them, generated ones as they were.
        dropped_messages: So many messages after the leading system content are not in them: the
            context policy dropped their turns.

    Raises:
        LimitError: None or too many ids, or a negative count.
    """

    token_ids: tuple[int, ...]
    dropped_messages: int = 0

    def __post_init__(self) -> None:
        check_range("transcript.token_ids", len(self.token_ids), 1, POSITION_MAX, "tokens")
        check_range("transcript.dropped_messages", self.dropped_messages, 0, POSITION_MAX)


class Transcripts(Protocol):
    """Where transcripts are kept: bounded, and lost without harm."""

    async def get_transcript(
        self, tenant: str, digests: Sequence[bytes]
    ) -> tuple[int, Transcript] | None:
        """The first of ``digests`` that is kept: its index and what is kept under it.

        Args:
            tenant: Whose.
            digests: 32 bytes each, the longest conversation first; at most ``LOOKBACK_ANSWERS``.
        """

    async def put_transcript(self, tenant: str, digest: bytes, transcript: Transcript) -> None:
        """Keep ``transcript`` under ``digest``, in place of what was there; may drop older ones."""


class MemoryTranscripts:
    """Transcripts in memory, the least recently used dropped first.

    Args:
        bytes_max: What all of them may take.

    Raises:
        LimitError: ``bytes_max`` is no positive number.
    """

    def __init__(self, bytes_max: int = 64 << 20) -> None:
        self._bytes_max = check_range("transcript_bytes", bytes_max, 1, 1 << 40, "bytes")
        self._kept: OrderedDict[tuple[str, bytes], Transcript] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes_taken(self) -> int:
        """What the kept ones take, roughly."""
        return self._bytes

    async def get_transcript(
        self, tenant: str, digests: Sequence[bytes]
    ) -> tuple[int, Transcript] | None:
        """The first of ``digests`` that is kept; it counts as used."""
        for index, digest in enumerate(digests):
            found = self._kept.get((tenant, digest))
            if found is not None:
                self._kept.move_to_end((tenant, digest))
                return index, found
        return None

    async def put_transcript(self, tenant: str, digest: bytes, transcript: Transcript) -> None:
        """Keep ``transcript``, and drop the longest unused ones beyond the bound."""
        before = self._kept.pop((tenant, digest), None)
        self._bytes += _bytes_of(transcript) - (_bytes_of(before) if before else 0)
        self._kept[(tenant, digest)] = transcript
        while self._bytes > self._bytes_max and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _bytes_of(dropped)


def _bytes_of(transcript: Transcript) -> int:
    return _ENTRY_BYTES + _BYTES_PER_TOKEN * len(transcript.token_ids)


@dataclass(frozen=True, slots=True, repr=False)
class Terms:
    """What, beside the messages, decides the ids of a conversation.

    Attributes:
        key: The tenant's.
        identity: The model's, for its tokenizer and template.
        tools: In the prompt.
        options: Of the template.
    """

    key: EpochKey
    identity: Identity
    tools: tuple[Tool, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)

    def seed(self) -> bytes:
        """32 bytes over all of it."""
        parts = (
            self.identity.tokenizer_digest,
            self.identity.chat_template_digest,
            fields.canonical(dict(self.options), "options"),
            *(tool.encoded for tool in self.tools),
        )
        return self.key.mac(_PURPOSE, *(piece for part in parts for piece in _framed(part)))


def digests(terms: Terms, messages: Sequence[Message]) -> list[bytes]:
    """A digest for each beginning of ``messages``, from one message to all of them.

    Thoughts are left out: clients do not send them back. What was generated for them is compared
    when the conversation is continued.
    """
    chain, found = terms.seed(), []
    for message in messages:
        chain = terms.key.mac(_PURPOSE, chain, _digested(message))
        found.append(chain)
    return found


def _digested(message: Message) -> bytes:
    value = message.to_json()
    value.pop("reasoning_content", None)
    return fields.canonical(value, "message")


def _framed(part: bytes) -> Iterator[bytes]:
    """A part with its length before it, so that no boundary can move."""
    yield len(part).to_bytes(8, "little")
    yield part


@dataclass(frozen=True, slots=True, repr=False)
class Found:
    """The kept beginning of a conversation.

    Attributes:
        covered_messages: So many of the conversation's first messages.
        transcript: Their exact ids.
    """

    covered_messages: int
    transcript: Transcript


async def find(transcripts: Transcripts, terms: Terms, messages: Messages) -> Found | None:
    """The longest beginning of ``messages`` that ends with an answer and whose ids are kept."""
    # As long as the conversation, which may be megabytes: not on the loop.
    chain = await asyncio.to_thread(digests, terms, messages)
    answers = [
        index
        for index in range(len(messages) - 1, -1, -1)
        if messages[index].role is Role.ASSISTANT
    ][:LOOKBACK_ANSWERS]
    if not answers:
        return None
    asked = [chain[index] for index in answers]
    hit = await transcripts.get_transcript(terms.key.tenant, asked)
    return None if hit is None else Found(answers[hit[0]] + 1, hit[1])


async def keep(
    transcripts: Transcripts, terms: Terms, messages: Messages, transcript: Transcript
) -> None:
    """Keep the ids of ``messages``, whose last one is the answer as the client got it."""
    chain = await asyncio.to_thread(digests, terms, messages)
    await transcripts.put_transcript(terms.key.tenant, chain[-1], transcript)


def known_of(found: Found, messages: Messages, leading: int) -> Known:
    """What is known of ``messages``, of which the first ``leading`` are the system's."""
    first = leading + found.transcript.dropped_messages
    kept = (*messages[:leading], *messages[first : found.covered_messages])
    return Known(kept, found.transcript.token_ids)
