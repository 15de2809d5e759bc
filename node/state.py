"""The SESSION and SAMPLER chunks: what a session is beyond its rows and token ids, as bytes.

Each payload begins with one byte, the version of its schema. The schemas are frozen: whoever meets
another version refuses it by its number.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvpack import limits
from kvpack.errors import VersionError
from kvpack.wire.scan import FieldRule, Kind, MessageRule, scan
from node.pb.v1 import state_pb2

if TYPE_CHECKING:
    from engine import DecodingState

STATE_VERSION: Final = 1
SAMPLER_VERSION: Final = 1

#: One message of a conversation, and all of them: what a chunk holds with room to spare.
MESSAGE_BYTES_MAX: Final = 1 << 20
MESSAGES_MAX: Final = 4096
STATE_BYTES_MAX: Final = 3 << 20

#: Logits of 262,144 tokens in float32. With as many messages they do not fit into one chunk.
LOGITS_BYTES_MAX: Final = 1 << 20
DIGEST_BYTES: Final = 32

#: A sampler with 1,024 biases, 4,096 tokens of history and four stop strings is far below.
SAMPLER_BYTES_MAX: Final = 256 << 10

_U63: Final = (1 << 63) - 1
_RULE: Final = MessageRule(
    MappingProxyType(
        {
            1: FieldRule("pending_token", Kind.UINT, high=limits.TOKEN_ID_MAX),
            2: FieldRule("revision", Kind.UINT, high=_U63),
            3: FieldRule("context_epoch", Kind.UINT, high=_U63),
            4: FieldRule("messages", Kind.BYTES, high=MESSAGE_BYTES_MAX, count_max=MESSAGES_MAX),
            5: FieldRule("boundary_digest", Kind.BYTES, high=DIGEST_BYTES, low=DIGEST_BYTES),
            6: FieldRule("boundary_logits", Kind.BYTES, high=LOGITS_BYTES_MAX),
            7: FieldRule("untold_tokens", Kind.UINT, high=limits.POSITION_MAX),
        }
    ),
    required=frozenset(),
    bytes_max=STATE_BYTES_MAX,
)


@dataclass(frozen=True, slots=True)
class SessionState:
    """What the SESSION chunk says.

    Attributes:
        pending_token: The boundary token.
        revision: How often tokens were given to the session.
        context_epoch: How often its context was rebuilt.
        messages: The conversation that a rebuild would begin from, one JSON object each. The
            user's text.
        boundary_digest: Of the boundary call's logits, in a cut that lies in a store; else empty.
        boundary_logits: The logits themselves, where they fit.
        untold_tokens: How many of the last known tokens, the boundary token with them, no client
            was given: a hand-over chooses one that nobody asked for.

    Raises:
        LimitError: A value is outside its range.
    """

    pending_token: int
    revision: int = 0
    context_epoch: int = 0
    messages: tuple[bytes, ...] = field(default=(), repr=False)
    boundary_digest: bytes = b""
    boundary_logits: bytes = field(default=b"", repr=False)
    untold_tokens: int = 0

    def __post_init__(self) -> None:
        limits.check_range("session.pending_token", self.pending_token, 0, limits.TOKEN_ID_MAX)
        limits.check_range("session.revision", self.revision, 0, _U63)
        limits.check_range("session.context_epoch", self.context_epoch, 0, _U63)
        limits.check_range("session.messages", len(self.messages), 0, MESSAGES_MAX)
        limits.check_range("session.untold_tokens", self.untold_tokens, 0, limits.POSITION_MAX)
        for message in self.messages:
            limits.check_range("session.messages", len(message), 1, MESSAGE_BYTES_MAX, "bytes")
        digest_bytes, logits_bytes = len(self.boundary_digest), len(self.boundary_logits)
        if digest_bytes:
            most = DIGEST_BYTES
            limits.check_range("session.boundary_digest", digest_bytes, most, most, "bytes")
        high = LOGITS_BYTES_MAX if digest_bytes else 0
        limits.check_range("session.boundary_logits", logits_bytes, 0, high, "bytes")


def encode_state(state: SessionState) -> bytes:
    """The SESSION chunk's plaintext.

    Raises:
        LimitError: The messages together are longer than a chunk may be.
    """
    encoded = state_pb2.SessionState(
        pending_token=state.pending_token,
        revision=state.revision,
        context_epoch=state.context_epoch,
        messages=state.messages,
        boundary_digest=state.boundary_digest,
        boundary_logits=state.boundary_logits,
        untold_tokens=state.untold_tokens,
    ).SerializeToString(deterministic=True)
    limits.check_range("session.bytes", len(encoded), 0, STATE_BYTES_MAX, "bytes")
    return bytes((STATE_VERSION,)) + encoded


def decode_state(plaintext: bytes | memoryview) -> SessionState:
    """What the SESSION chunk says.

    Raises:
        VersionError: Another version.
        FormatError: Not exactly the bytes that :func:`encode_state` makes.
        LimitError: Too long, or a value outside its range.
    """
    encoded = _without_version(plaintext, "session", STATE_VERSION, STATE_BYTES_MAX)
    scan(_RULE, encoded, "session")
    message = state_pb2.SessionState.FromString(encoded)
    return SessionState(
        message.pending_token, message.revision, message.context_epoch, tuple(message.messages),
        message.boundary_digest, message.boundary_logits, message.untold_tokens,
    )  # fmt: skip


def with_boundary(state: SessionState, digest: bytes, logits: bytes) -> SessionState:
    """``state`` with what its boundary call gave; without the logits where they do not fit.

    Raises:
        LimitError: The digest has another length.
    """
    room = STATE_BYTES_MAX - sum(len(message) + 8 for message in state.messages) - 256
    kept = logits if len(logits) <= min(room, LOGITS_BYTES_MAX) else b""
    return dataclasses.replace(state, boundary_digest=digest, boundary_logits=kept)


def encode_sampler(decoding: DecodingState) -> bytes:
    """The SAMPLER chunk's plaintext: the engine's record of sampler and text."""
    return bytes((SAMPLER_VERSION,)) + decoding.to_bytes()


def decode_sampler(plaintext: bytes | memoryview) -> DecodingState:
    """What the SAMPLER chunk says.

    Raises:
        VersionError: Another version.
        FormatError: Not a record of that version.
        LimitError: Too long, or a field outside its cap.
    """
    from engine import DecodingState

    encoded = _without_version(plaintext, "sampler", SAMPLER_VERSION, SAMPLER_BYTES_MAX)
    return DecodingState.from_bytes(encoded)


def _without_version(plaintext: bytes | memoryview, name: str, version: int, most: int) -> bytes:
    limits.check_range(f"{name}.bytes", len(plaintext), 1, most + 1, "bytes")
    if plaintext[0] != version:
        raise VersionError(f"{name}.version", version, plaintext[0])
    return bytes(plaintext[1:])
