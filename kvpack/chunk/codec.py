"""Byte-split zstd: the second codec. Off by default; who turns it on is the caller's rule.

An f16 element is a noisy low byte and a compressible high byte. Split into one plane of bytes for
each byte of an element, the high plane compresses and the low one costs nothing.

Encoded bytes = one byte with the plane count, then one zstd frame that states its content size and
carries neither checksum nor dictionary: the tag over the chunk is the checksum, and what a binding
does about the two is its own choice, while a pack has one answer everywhere.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Final

import zstandard

from kvpack import limits
from kvpack.errors import FormatError

#: Elements have two bytes, or four in f32.
PLANE_COUNTS: Final = (2, 4)

LEVEL: Final = 1

#: Less than this share saved is not worth a decompression.
SAVED_PER_MILLE_MIN: Final = 30

#: A frame of at most 4 MiB needs no larger window: this bounds what a hostile frame makes us take.
_WINDOW_BYTES_MAX: Final = 8 << 20

#: Two-byte elements, which is all but one backend, go through numpy where it is installed: measured
#: 2.7 times as fast as slices to split and 2.1 to join. Four-byte ones gain nothing from it.
_WORD_BYTES: Final = 2

_FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"

#: Magic, descriptor, one more byte of the header, and the header of one block.
_FRAME_BYTES_MIN: Final = 4 + 1 + 1 + 3

#: Bits of the frame header's descriptor: dictionary id, checksum, reserved, unused.
_FORBIDDEN_FLAGS: Final = 0b0001_1111
_SINGLE_SEGMENT: Final = 0b0010_0000


def compress(plaintext: bytes | memoryview, plane_count: int, level: int = LEVEL) -> bytes | None:
    """Encode ``plaintext``, or None where that would save less than 3 %.

    Args:
        plaintext: Whole elements.
        plane_count: Bytes of one element, 2 or 4.
        level: zstd level.
    """
    if plane_count not in PLANE_COUNTS or len(plaintext) % plane_count:
        return None
    compressor = zstandard.ZstdCompressor(
        level=level, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    frame = compressor.compress(split_planes(plaintext, plane_count))
    if (len(frame) + 1) * 1000 > len(plaintext) * (1000 - SAVED_PER_MILLE_MIN):
        return None
    return bytes([plane_count]) + frame


def decompress(encoded: bytes | memoryview, plain_bytes: int) -> memoryview:
    """Decode to exactly ``plain_bytes``, which the caller has checked against the cap; read-only.

    Raises:
        FormatError: Another size is declared or found, bytes follow the frame, or it is no plain
            frame; also LimitError.
    """
    plane_count = encoded[0] if encoded else 0
    if plane_count not in PLANE_COUNTS or plain_bytes % plane_count:
        raise FormatError("chunk.plane_count", "2 or 4, dividing the plaintext", plane_count)
    frame = memoryview(encoded)[1:]
    _check_frame_header(frame)
    try:
        # The declared size is compared before anything is expanded.
        declared = zstandard.frame_content_size(frame)
        if declared != plain_bytes:
            raise FormatError("chunk.frame_content_size", plain_bytes, declared)
        decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
        planes = decompressor.decompress(
            frame, max_output_size=plain_bytes, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError("chunk.frame", "one whole zstd frame", str(error)) from error
    if len(planes) != plain_bytes:
        raise FormatError("chunk.frame", f"{plain_bytes} bytes", f"{len(planes)} bytes")
    return join_planes(planes, plane_count)


def _check_frame_header(frame: memoryview) -> None:
    """Refuse frames about which two zstd bindings may differ: skippable, legacy, with a checksum.

    Raises:
        FormatError: Not the beginning of a plain frame.
        LimitError: Its window is larger than any chunk needs.
    """
    if bytes(frame[:4]) != _FRAME_MAGIC or len(frame) < _FRAME_BYTES_MIN:
        raise FormatError("chunk.frame", "a zstd frame", bytes(frame[:4]).hex() or "nothing")
    if frame[4] & _FORBIDDEN_FLAGS:
        raise FormatError("chunk.frame", "neither checksum nor dictionary", f"0x{frame[4]:02x}")
    if not frame[4] & _SINGLE_SEGMENT:
        # Decoders that see the whole output at once do not look at the window; others refuse it.
        base = 1 << (10 + (frame[5] >> 3))
        window_bytes = base + (base >> 3) * (frame[5] & 7)
        limits.check_range("chunk.frame_window", window_bytes, 1, _WINDOW_BYTES_MAX, "bytes")


def split_planes(plaintext: bytes | memoryview, plane_count: int) -> bytes | memoryview:
    """The first byte of every element, then the second of every element, and so on."""
    numpy = _numpy() if plane_count == _WORD_BYTES else None
    if numpy is None:
        source = bytes(plaintext)
        return b"".join(source[start::plane_count] for start in range(plane_count))
    words = numpy.frombuffer(plaintext, "<u2")
    planes = numpy.empty((_WORD_BYTES, len(words)), numpy.uint8)
    numpy.bitwise_and(words, 0xFF, out=planes[0], casting="unsafe")
    numpy.right_shift(words, 8, out=planes[1], casting="unsafe")
    return memoryview(planes.reshape(-1))


def join_planes(planes: bytes, plane_count: int) -> memoryview:
    """The inverse of :func:`split_planes`; read-only."""
    plane_bytes = len(planes) // plane_count
    numpy = _numpy() if plane_count == _WORD_BYTES else None
    if numpy is None:
        joined, view = bytearray(len(planes)), memoryview(planes)
        for plane in range(plane_count):
            joined[plane::plane_count] = view[plane * plane_bytes : (plane + 1) * plane_bytes]
        return memoryview(joined).toreadonly()
    halves = numpy.frombuffer(planes, numpy.uint8).reshape(_WORD_BYTES, plane_bytes)
    words = halves[1].astype("<u2")
    words <<= 8
    words |= halves[0]
    return memoryview(words.view(numpy.uint8)).toreadonly()


@functools.cache
def _numpy() -> ModuleType | None:
    """numpy if it is installed, loaded on first use: kvpack alone does without it."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
