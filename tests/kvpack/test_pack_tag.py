"""A tag that is checked without decrypting gives the verdict that decrypting gives."""

from __future__ import annotations

import io

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from pack_kit import KEYRING, pack

from kvpack.bundle import BundleReader, Depth
from kvpack.bundle.payload import PayloadCheck
from kvpack.chunk.reference import ChunkReference
from kvpack.chunk.seal import NONCE
from kvpack.chunk.tag import TagCheck, can_check_in_pieces, length_correction
from kvpack.codes import Aead, ChunkClass, Codec
from kvpack.errors import AuthenticationError
from kvpack.keys import EpochKey

KEY = EpochKey("tenant", 1, bytes(range(32)))
SEAL_ID = bytes([3]) * 32


def _reference(encoded_bytes: int) -> ChunkReference:
    return ChunkReference(
        ChunkClass.SAMPLER, (), 256, 0, bytes(32), SEAL_ID, Codec.RAW, Aead.AES_256_GCM, 1,
        encoded_bytes, encoded_bytes, 0,
    )  # fmt: skip


def _fed(associated: bytes, sealed: bytes, edges: list[int]) -> None:
    """Check ``sealed`` in pieces that end at ``edges``."""
    count = len(sealed) - 16
    check = TagCheck(KEY, _reference(count), associated)
    ends = sorted({edge % count for edge in edges} - {0})
    for start, end in zip([0, *ends], [*ends, count], strict=True):
        check.update(memoryview(sealed)[start:end])
    check.finish(memoryview(sealed)[count:], "chunk")


@given(
    st.binary(max_size=40), st.binary(min_size=1, max_size=200), st.lists(st.integers(0, 200)),
    st.integers(0, 2000),
)  # fmt: skip
def test_the_tag_holds_for_any_lengths_and_pieces_and_for_no_changed_bit(
    associated: bytes, plaintext: bytes, edges: list[int], flipped: int
) -> None:
    cipher = AESGCM(KEY.subkey("chunk", SEAL_ID))
    sealed = cipher.encrypt(NONCE, plaintext, associated)
    _fed(associated, sealed, edges)
    place = flipped % (8 * (len(associated) + len(sealed)))
    changed = bytearray(associated + sealed)
    changed[place // 8] ^= 1 << place % 8
    bad = bytes(changed)
    with pytest.raises(AuthenticationError, match=r"chunk: .*\(tag\)"):
        _fed(bad[: len(associated)], bad[len(associated) :], edges)


def test_bytes_that_move_between_header_and_ciphertext_are_refused() -> None:
    """Both go over the same blocks then, so the lengths alone tell."""
    cipher = AESGCM(KEY.subkey("chunk", SEAL_ID))
    sealed = cipher.encrypt(NONCE, bytes(64), bytes(32))
    moved = bytes(32) + sealed[:16], sealed[16:]
    with pytest.raises(AuthenticationError):
        _fed(*moved, [])
    with pytest.raises(AuthenticationError):
        _fed(bytes(48), sealed, [])


def test_the_correction_is_what_the_standard_says() -> None:
    """Test case 16 of the GCM specification: AES-256, 20 bytes beside 60."""
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    beside = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    sealed = bytes.fromhex(
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
    )
    tag = bytes.fromhex("76fc6ece0f4e1768cddf8853bb2d551b")
    nonce = bytes.fromhex("cafebabefacedbaddecaf888")
    hash_key = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(16))
    assert hash_key.hex() == "acbef20579b4b8ebce889bac8732dad7"
    correction = length_correction(hash_key, len(beside), len(sealed))
    other = bytes(a ^ b for a, b in zip(tag, correction, strict=True))
    check = Cipher(algorithms.AES(key), modes.GCM(nonce)).decryptor()
    check.authenticate_additional_data(beside + bytes(12))
    check.authenticate_additional_data(sealed)
    check.finalize_with_tag(other)


def test_a_verification_makes_no_plaintext_and_a_deep_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = pack(600)
    made: list[PayloadCheck] = []
    prepare = PayloadCheck.prepare

    def seen(self: PayloadCheck, *rest: object) -> object:
        made.append(self)
        return prepare(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PayloadCheck, "prepare", seen)
    for depth in (Depth.FULL, Depth.DEEP):
        made.clear()
        BundleReader(io.BytesIO(data), KEYRING).check(depth)
        assert made
        assert all(bool(len(check._plain)) is (depth is Depth.DEEP) for check in made)


def test_the_vectors_chunks_are_of_the_kind_that_is_checked_so() -> None:
    """Else the tests over every byte of a pack would say nothing of this."""
    reader = BundleReader(io.BytesIO(pack(600)), KEYRING)
    assert all(can_check_in_pieces(reference) for reference in reader.manifest.references)
