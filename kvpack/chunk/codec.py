"""Byte-split zstd: the second codec. Off by default; who turns it on is the caller's rule.

An f16 element is a noisy low byte and a compressible high byte. Split into one plane of bytes for
each byte of an element, the high plane compresses and the low one costs nothing.

Encoded bytes = one byte with the plane count, then one zstd frame that states its content size.
"""

from __future__ import annotations

from typing import Final

import zstandard

from kvpack.errors import FormatError

#: Elements have two bytes, or four in f32.
PLANE_COUNTS: Final = (2, 4)

LEVEL: Final = 1

#: Less than this share saved is not worth a decompression.
SAVED_PER_MILLE_MIN: Final = 30

#: A frame of at most 4 MiB needs no larger window: this bounds what a hostile frame makes us take.
_WINDOW_BYTES_MAX: Final = 8 << 20


def compress(plaintext: bytes | memoryview, plane_count: int, level: int = LEVEL) -> bytes | None:
    """Encode ``plaintext``, or None where that would save less than 3 %.

    Args:
        plaintext: Whole elements.
        plane_count: Bytes of one element, 2 or 4.
        level: zstd level.
    """
    if plane_count not in PLANE_COUNTS or len(plaintext) % plane_count:
        return None
    source = bytes(plaintext)
    planes = b"".join(source[start::plane_count] for start in range(plane_count))
    compressor = zstandard.ZstdCompressor(
        level=level, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    encoded = bytes([plane_count]) + compressor.compress(planes)
    if len(encoded) * 1000 > len(source) * (1000 - SAVED_PER_MILLE_MIN):
        return None
    return encoded


def decompress(encoded: bytes | memoryview, plain_bytes: int) -> bytes:
    """Decode to exactly ``plain_bytes``, which the caller has checked against the cap.

    Raises:
        FormatError: Another size is declared or found, bytes follow the frame, or it is no frame.
    """
    plane_count = encoded[0]
    if plane_count not in PLANE_COUNTS or plain_bytes % plane_count:
        raise FormatError("chunk.plane_count", "2 or 4, dividing the plaintext", plane_count)
    frame = bytes(encoded[1:])
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
    plane_bytes = plain_bytes // plane_count
    joined = bytearray(plain_bytes)
    for plane in range(plane_count):
        joined[plane::plane_count] = planes[plane * plane_bytes : (plane + 1) * plane_bytes]
    return bytes(joined)
