"""The few lines of protobuf that a writer needs; defects are made by joining the wrong pieces."""

from __future__ import annotations


def varint(value: int, padded: int = 0) -> bytes:
    """A varint; ``padded`` adds that many bytes that say nothing."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value | (128 if padded else 0))
    return bytes(out) + b"\x80" * (padded - 1) + b"\0" * (padded > 0)


def number(field: int, value: int) -> bytes:
    """A number, absent where it is 0."""
    return varint(field << 3) + varint(value) if value else b""


def fixed64(field: int, bits: int) -> bytes:
    """A fixed64, absent where it is 0."""
    return varint(field << 3 | 1) + bits.to_bytes(8, "little") if bits else b""


def data(field: int, content: bytes | str) -> bytes:
    """Text, bytes, a message or a packed list; present also where it is empty."""
    raw = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(raw)) + raw
