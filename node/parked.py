"""What a directory says of a session that lies in a store.

Its owner is then no node but the store, by its own identity: ``store.`` and 32 hexadecimal digits,
which no certificate can carry as a name. The nonce of the write that made it so is drawn from the
cut, so the entry alone proves which cut the session is. Beside it stands a value for people and for
a restart: which store, which cut, and where the store lay for whoever put the session there.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.errors import FormatError
from node.directory import NONCE_BYTES

_PREFIX: Final = "store."
_OWNER: Final = re.compile(r"store\.([0-9a-f]{32})")

IDENTITY_BYTES: Final = 16
CUT_ID_BYTES: Final = 32

#: Longest path of a store, as the node was given it. What Linux takes in one call is 4,096.
PLACE_BYTES_MAX: Final = 1024

_MAGIC: Final = b"kvpark01"
_FIELDS: Final = struct.Struct(">8s16s32sI")


def store_owner(identity: bytes) -> str:
    """How a directory names the store of that identity.

    Raises:
        LimitError: It is not 16 bytes.
    """
    size = IDENTITY_BYTES
    limits.check_range("store.identity", len(identity), size, size, "bytes")
    return f"{_PREFIX}{identity.hex()}"


def identity_of(owner: str) -> bytes | None:
    """The identity of the store that ``owner`` names; None where it names a node."""
    found = _OWNER.fullmatch(owner)
    return None if found is None else bytes.fromhex(found[1])


def parked_nonce(session_id: str, identity: bytes, cut_id: bytes) -> bytes:
    """Marks the write by which a session begins to lie in a store at that cut."""
    name = b"\0".join((b"kvnode parked", session_id.encode(), identity, cut_id))
    return hashlib.sha256(name).digest()[:NONCE_BYTES]


@dataclass(frozen=True, slots=True)
class Parked:
    """The value that a directory keeps of a session in a store.

    Attributes:
        identity: Of the store, 16 bytes.
        cut_id: Which cut, 32 bytes.
        position: Tokens of the cut.
        place: Where the store lay for the node that wrote it. A hint: another node may reach it
            elsewhere, and every node opens only what its own operator allows.

    Raises:
        LimitError: A field is outside its range.
    """

    identity: bytes
    cut_id: bytes
    position: int
    place: str

    def __post_init__(self) -> None:
        store_owner(self.identity)
        size = CUT_ID_BYTES
        limits.check_range("parked.cut_id", len(self.cut_id), size, size, "bytes")
        limits.check_range("parked.position", self.position, 1, limits.POSITION_MAX, "tokens")
        length = len(self.place.encode("utf-8", errors="replace"))
        limits.check_range("parked.place", length, 1, PLACE_BYTES_MAX, "bytes")

    def nonce(self, session_id: str) -> bytes:
        """Of the write that makes the store the session's owner."""
        return parked_nonce(session_id, self.identity, self.cut_id)

    def encode(self) -> bytes:
        """As a directory keeps it."""
        fields = _FIELDS.pack(_MAGIC, self.identity, self.cut_id, self.position)
        return fields + self.place.encode()

    @classmethod
    def decode(cls, value: bytes) -> Parked:
        """Read what :meth:`encode` wrote.

        Raises:
            FormatError: Something else.
            LimitError: A field is outside its range.
        """
        if len(value) < _FIELDS.size or not value.startswith(_MAGIC):
            raise FormatError("parked", "a reference to a cut in a store", f"{len(value)} bytes")
        _, identity, cut_id, position = _FIELDS.unpack_from(value)
        try:
            place = value[_FIELDS.size :].decode()
        except UnicodeDecodeError as error:
            raise FormatError("parked.place", "UTF-8", "other bytes") from error
        return cls(identity, cut_id, position, place)
