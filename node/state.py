"""The SESSION chunk: what a session is beyond its rows and token ids, as bytes."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from kvpack import limits
from kvpack.errors import VersionError
from kvpack.wire.scan import FieldRule, Kind, MessageRule, scan
from node.pb.v1 import state_pb2

STATE_VERSION: Final = 1

#: One small integer; a later version is refused by its number.
STATE_BYTES_MAX: Final = 64

_RULE: Final = MessageRule(
    MappingProxyType({1: FieldRule("pending_token", Kind.UINT, high=limits.TOKEN_ID_MAX)}),
    required=frozenset(),
    bytes_max=STATE_BYTES_MAX,
)


def encode_state(pending_token: int) -> bytes:
    """The chunk's plaintext for a session whose boundary token is ``pending_token``.

    Raises:
        LimitError: Not a token id.
    """
    limits.check_range("session.pending_token", pending_token, 0, limits.TOKEN_ID_MAX)
    state = state_pb2.SessionState(pending_token=pending_token)
    return bytes((STATE_VERSION,)) + state.SerializeToString(deterministic=True)


def decode_state(plaintext: bytes | memoryview) -> int:
    """The boundary token that the chunk names.

    Raises:
        VersionError: Another version.
        FormatError: Not exactly the bytes that :func:`encode_state` makes.
        LimitError: Too long, or a value outside its range.
    """
    limits.check_range("session.bytes", len(plaintext), 1, STATE_BYTES_MAX, "bytes")
    if plaintext[0] != STATE_VERSION:
        raise VersionError("session.version", STATE_VERSION, plaintext[0])
    encoded = bytes(plaintext[1:])
    scan(_RULE, encoded, "session")
    return state_pb2.SessionState.FromString(encoded).pending_token
