"""Signatures: integrity and origin for someone who holds no secret."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pack_kit import (
    HEADER,
    KEY,
    KEYRING,
    NUMERICS,
    forward,
    pack,
    random_access,
    schedule,
    snapshot,
)

from kvpack.bundle import BundleReader, verify_signed, write_snapshot
from kvpack.errors import AuthenticationError, KvpackError

SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = SIGNER.public_key().public_bytes_raw()


def _signed(position: int = 9) -> bytes:
    sink = io.BytesIO()
    write_snapshot(
        sink, KEY, HEADER, snapshot(position), NUMERICS, schedule(position), signer=SIGNER
    )
    return sink.getvalue()


def test_a_signed_pack_is_good_with_the_key_and_without(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(_signed())
    assert random_access(_signed()).accepted
    assert forward(_signed()).accepted
    header, manifest, parts = verify_signed(path, PUBLIC)
    index = BundleReader(io.BytesIO(_signed()), KEYRING).index
    assert (header, manifest, parts.signature) == (index.header, index.manifest, index.signature)


def test_what_is_signed_is_what_the_specification_says() -> None:
    reader = BundleReader(io.BytesIO(_signed()), KEYRING)
    message = b"kvpack/v1/sig" + blake3(reader.index.header_bytes).digest()
    for data in reader.objects():
        message += len(data).to_bytes(8, "little") + blake3(data).digest()
    message += blake3(reader.index.manifest_blob).digest()
    block = reader.index.signature
    assert block[:32] == PUBLIC
    Ed25519PublicKey.from_public_bytes(PUBLIC).verify(block[32:], message)


def test_without_the_secret_every_changed_byte_but_the_macs_own_is_refused(tmp_path: Path) -> None:
    good = _signed(0)
    path = tmp_path / "a"
    footer_mac = range(len(good) - 32, len(good))
    accepted = []
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            verify_signed(path, PUBLIC)
        except KvpackError:
            continue
        accepted.append(place)
    # The footer's MAC needs the secret; the lengths that it covers are checked without it.
    assert accepted == list(footer_mac)


def test_every_changed_byte_is_refused_alike_with_the_key() -> None:
    good = _signed(0)
    for place in range(len(good)):
        bad = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        verdicts = random_access(bad), forward(bad)
        assert not any(verdict.accepted for verdict in verdicts), place
        assert verdicts[0].reason == verdicts[1].reason, place


def test_chunks_are_covered_and_an_unsigned_or_foreign_pack_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    good = _signed()
    index = BundleReader(io.BytesIO(good), KEYRING).index
    place = index.footer.header_bytes + 200
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    with pytest.raises(AuthenticationError, match="not over these bytes"):
        verify_signed(path, PUBLIC)
    path.write_bytes(good)
    with pytest.raises(AuthenticationError, match=f"the signer is {PUBLIC.hex()[:16]}"):
        verify_signed(path, bytes(32))
    path.write_bytes(pack(9))
    with pytest.raises(AuthenticationError, match="not signed"):
        verify_signed(path, PUBLIC)
