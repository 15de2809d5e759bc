"""Section 8: the signature, for someone who holds no secret."""

from __future__ import annotations

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.reference.bundle import (
    FOOTER,
    Cursor,
    Index,
    parse_footer,
    read_header,
    read_index,
    split_tail,
)
from tests.reference.chunk import FIXED, TAG, Chunk, header_bytes, parse_header
from tests.reference.verdict import Refused, need


def verify_signed(data: bytes, signer: bytes) -> Index:
    """Framing, hashes, signature; then scan, gate and references. Opens nothing.

    Raises:
        Refused: The first step that does not hold.
    """
    header = read_header(Cursor(data).read)
    footer = parse_footer(data[-FOOTER:], len(data))
    tail = data[len(data) - footer.tail_bytes :]
    blob, block = split_tail(header, footer, tail)
    cursor = Cursor(data[: len(data) - footer.tail_bytes], len(header.raw))
    fed = [b"kvpack/v1/sig", blake3(header.raw).digest()]
    chunks = [_hash_object(cursor, fed) for _ in range(footer.chunk_count)]
    need(cursor.at == len(cursor.data), "sums", "objects end elsewhere")
    fed.append(blake3(blob).digest())
    _check(block, signer, b"".join(fed))
    index = read_index(None, header, footer, tail)
    for number, chunk in enumerate(chunks):
        index.compare(chunk, number, "malformed")
    for chunk in chunks:
        index.belongs(chunk)
    return index


def _hash_object(cursor: Cursor, fed: list[bytes]) -> Chunk:
    fixed = cursor.read(FIXED)
    more = header_bytes(fixed) - FIXED if fixed[:4] == b"KVPC" else 0
    chunk = parse_header(fixed + cursor.read(more))
    body = cursor.read(chunk.fields["encoded_bytes"] + TAG)
    need(len(body) == chunk.fields["encoded_bytes"] + TAG, "chunk.4", "cut")
    stored = chunk.header + body
    fed.append(len(stored).to_bytes(8, "little") + blake3(stored).digest())
    return chunk


def _check(block: bytes, signer: bytes, message: bytes) -> None:
    need(len(block) == 96 and block[:32] == signer, "signature", "signer", "not_authentic")
    try:
        Ed25519PublicKey.from_public_bytes(signer).verify(block[32:], message)
    except InvalidSignature:
        raise Refused("not_authentic", "signature", "signature") from None
