"""The bytes of a plain data plane: a hello, frames, an acknowledgement. Pure functions of a key.

The hello shows the ticket's token, in the clear. What follows is tagged with the ticket's frame
key, which no plain wire ever carried: a tag binds a frame to its place in the stream, to its length
and to the first bytes of its piece. These hold the whole header of a chunk, and with it the seal id
from which the chunk's own key is derived; so the chunk's own tag says the rest. Whoever sits on the
wire can end a stream, and neither change, reorder, repeat, cut out nor add a piece.

On the socket a frame is length (4), tag (16), piece; on gRPC it is one message: tag, piece. An
empty piece is the end. Then the target answers with the number of frames and a tag over it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from node.migration.wire import PIECE_BYTES_MAX

#: Name and version; another framing has another one.
MAGIC: Final = b"kvplane1"

TOKEN_BYTES: Final = 32
KEY_BYTES: Final = 32
TAG_BYTES: Final = 16

#: How much of a piece its tag covers. The longest chunk header is well below it.
HEAD_BYTES: Final = 2048

_HELLO: Final = struct.Struct(f">{len(MAGIC)}sQ{TOKEN_BYTES}s")
_FRAME: Final = struct.Struct(f">I{TAG_BYTES}s")
_TAKEN: Final = struct.Struct(f">Q{TAG_BYTES}s")
_PLACE: Final = struct.Struct(">QI")

HELLO_BYTES: Final = _HELLO.size
FRAME_BYTES: Final = _FRAME.size
TAKEN_BYTES: Final = _TAKEN.size


class DisturbedError(Exception):
    """The stream is not what its source wrote, or it broke. It ends; the transfer does not."""


@dataclass(frozen=True, slots=True, repr=False)
class Hello:
    """What a connection begins with: the ticket's number, and its token."""

    number: int
    token: bytes

    def encode(self) -> bytes:
        """The 48 bytes."""
        return _HELLO.pack(MAGIC, self.number, self.token)


def decode_hello(data: bytes) -> Hello | None:
    """Read a hello; None: it is none."""
    if len(data) != HELLO_BYTES:
        return None
    magic, number, token = _HELLO.unpack(data)
    return Hello(number, token) if magic == MAGIC else None


class Tags:
    """The tags of one stream, in order. Both ends have one, and count alike."""

    def __init__(self, frame_key: bytes) -> None:
        limits.check_range("plane.frame_key", len(frame_key), KEY_BYTES, KEY_BYTES, "bytes")
        self._key = frame_key
        self._frames = 0

    def next(self, piece: bytes | memoryview) -> bytes:
        """The tag of the next frame."""
        place = _PLACE.pack(self._frames, len(piece))
        self._frames += 1
        return self._tag(b"kvplane1 frame", place, memoryview(piece)[:HEAD_BYTES])

    def require(self, tag: bytes | memoryview, piece: bytes | memoryview) -> None:
        """Check the tag of the next frame.

        Raises:
            DisturbedError: It is another.
        """
        if not hmac.compare_digest(tag, self.next(piece)):
            raise DisturbedError("a frame that the source did not write, or not here")

    def frame_header(self, piece: bytes | memoryview) -> bytes:
        """What stands before ``piece`` on a socket."""
        return _FRAME.pack(len(piece), self.next(piece))

    def taken(self) -> bytes:
        """What the target says when it has taken all frames up to the end."""
        return _TAKEN.pack(self._frames, self._taken_tag())

    def require_taken(self, data: bytes) -> None:
        """Check what the target says.

        Raises:
            DisturbedError: It is not what a target says that took all.
        """
        if not hmac.compare_digest(data, self.taken()):
            raise DisturbedError("not the target's acknowledgement of all frames")

    def _taken_tag(self) -> bytes:
        return self._tag(b"kvplane1 taken", _PLACE.pack(self._frames, 0), b"")

    def _tag(self, person: bytes, place: bytes, head: bytes | memoryview) -> bytes:
        tag = hashlib.blake2b(place, digest_size=TAG_BYTES, key=self._key, person=person)
        tag.update(head)
        return tag.digest()


def read_frame_header(data: bytes | memoryview) -> tuple[int, bytes]:
    """Length of the piece that follows, at most ``PIECE_BYTES_MAX``, and its tag.

    Raises:
        DisturbedError: No piece is so long.
    """
    length, tag = _FRAME.unpack(data)
    if length > PIECE_BYTES_MAX:
        raise DisturbedError(f"a piece of {length} bytes, expected at most {PIECE_BYTES_MAX}")
    return length, tag
