"""What writers and collectors tell each other: one small object, read without any key.

::

    offset  bytes  field
         0      4  magic "KVPR"
         4      1  version, 1
         5      1  state: 1 open, 2 publishing, 3 closed, 4 sweep
         6      2  reserved, 0
         8      8  expires, seconds since 1970
        16      8  reserved bytes: what the writer has still to write
        24      4  pins P
        28      4  completions Q
        32      4  text bytes N
        36      4  cut bytes C
        40      N  P + Q object names, each followed by a line feed
      40+N      C  header and manifest of the cut that is being published
    40+N+C     32  BLAKE3 over all bytes before

All numbers are unsigned and little-endian. The checksum is against accidents: a record decides only
what is kept, and whoever can write here can delete files anyway.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack import limits
from kvpack.errors import FormatError, VersionError
from kvpack.header import HEADER_BYTES_MAX
from kvpack.manifest.sealed import BLOB_BYTES_MAX
from kvpack.store.names import check_object_name

MAGIC: Final = b"KVPR"
VERSION: Final = 1
CHECKSUM_BYTES: Final = 32

#: A cut with the longest header and manifest.
CUT_BYTES_MAX: Final = HEADER_BYTES_MAX + BLOB_BYTES_MAX

#: A cut, and the names of twice as many objects as one manifest can refer to.
RECORD_BYTES_MAX: Final = 40 << 20
NAMES_MAX: Final = 2 * limits.REFERENCES_MAX

_FIELDS: Final = struct.Struct("<4sBBHQQIIII")


class State(enum.Enum):
    """What a record says.

    OPEN: its writer relies on the pins until it expires. PUBLISHING: the same, and the cut in it is
    decided: whoever finds the record may finish the work. CLOSED: the writer's intent has ended.
    SWEEP: a collector is about to delete the pins.
    """

    OPEN = 1
    PUBLISHING = 2
    CLOSED = 3
    SWEEP = 4


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """One record.

    Attributes:
        state: What it says.
        expires: Seconds since 1970; 0 where it does not matter.
        reserve_bytes: What the writer has still to write.
        pins: Names of objects.
        completions: PUBLISHING: names of empty objects to create with the cut.
        cut: PUBLISHING: header and manifest.

    Raises:
        LimitError: A count or size is outside its cap.
        FormatError: A cut or completions where the state allows none.
    """

    state: State
    expires: int = 0
    reserve_bytes: int = 0
    pins: tuple[str, ...] = ()
    completions: tuple[str, ...] = ()
    cut: bytes = b""

    def __post_init__(self) -> None:
        limits.check_range("record.expires", self.expires, 0, (1 << 63) - 1, "seconds")
        limits.check_range("record.reserve_bytes", self.reserve_bytes, 0, (1 << 63) - 1)
        limits.check_range("record.pins", len(self.pins), 0, NAMES_MAX)
        limits.check_range("record.completions", len(self.completions), 0, NAMES_MAX)
        publishing = self.state is State.PUBLISHING
        limits.check_range("record.cut", len(self.cut), int(publishing), CUT_BYTES_MAX, "bytes")
        if not publishing and (self.cut or self.completions):
            raise FormatError("record.cut", f"none in state {self.state.name.lower()}", "a cut")

    def __repr__(self) -> str:
        return f"Record({self.state.name}, {len(self.pins)} pins, {len(self.cut)} bytes of cut)"

    def encode(self) -> bytes:
        """The record's bytes."""
        text = "".join(f"{name}\n" for name in (*self.pins, *self.completions)).encode()
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.state.value,
            0,
            self.expires,
            self.reserve_bytes,
            len(self.pins),
            len(self.completions),
            len(text),
            len(self.cut),
        )
        body = fields + text + self.cut
        return body + blake3(body).digest()


def decode_record(data: bytes) -> Record:
    """Read a record.

    Raises:
        FormatError: Not one, or damaged. VersionError: One of another version. LimitError.
    """
    if len(data) < _FIELDS.size + CHECKSUM_BYTES:
        raise FormatError("record", f">= {_FIELDS.size + CHECKSUM_BYTES} bytes", len(data))
    magic, version, state, reserved, expires, reserve, pins, completions, text_bytes, cut_bytes = (
        _FIELDS.unpack_from(data)
    )
    if magic != MAGIC:
        raise FormatError("record.magic", MAGIC.hex(), magic.hex())
    if version != VERSION:
        raise VersionError("record.version", VERSION, version)
    expected = _FIELDS.size + text_bytes + cut_bytes + CHECKSUM_BYTES
    if len(data) != expected:
        raise FormatError("record", f"{expected} bytes", f"{len(data)} bytes")
    body = data[:-CHECKSUM_BYTES]
    if blake3(body).digest() != data[-CHECKSUM_BYTES:]:
        raise FormatError("record.checksum", "that of its bytes", "another")
    if reserved or state not in {member.value for member in State}:
        raise FormatError("record.state", "1 to 4, reserved 0", f"{state}, {reserved}")
    text_end = _FIELDS.size + text_bytes
    found = _names(data[_FIELDS.size : text_end])
    if len(found) != pins + completions:
        raise FormatError("record.pins", pins + completions, len(found))
    return Record(
        State(state), expires, reserve, found[:pins], found[pins:], body[text_end:]
    )  # fmt: skip


def _names(text: bytes) -> tuple[str, ...]:
    lines = text.decode(errors="replace").split("\n")
    if lines.pop():
        raise FormatError("record.pins", "a line feed after each name", "none after the last")
    return tuple(check_object_name(line) for line in lines)
