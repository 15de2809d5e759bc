"""A chunk's tag, checked piece by piece: with the plaintext for whoever hashes it, or without any.

GCM's tag is over the ciphertext. With H the cipher of a block of zeros, J the cipher of the first
counter, + exclusive or and * the product in GCM's field, it is, for associated data A and
ciphertext C, each filled up with zeros to whole blocks,

    tag = GHASH(A, C, [bits of A, bits of C]) + J

and the last block that goes into GHASH is only multiplied by H. So a cipher that is given A and C
as associated data, and nothing to decrypt, goes over the same blocks and differs in the last one:

    tag' = GHASH(A, C, [bits of both, 0]) + J
    tag + tag' = ([bits of A, bits of C] + [bits of both, 0]) * H

That product is computed here, and the library computes and compares the tag. The verdict is the
one that decrypting gives, for half of the work, and no plaintext comes to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    Cipher,
    algorithms,
    modes,
)

from kvpack.chunk.open import require_content_id
from kvpack.chunk.reference import ChunkReference
from kvpack.chunk.seal import NONCE
from kvpack.codes import Aead, Codec
from kvpack.errors import AuthenticationError
from kvpack.keys import EpochKey

#: The cipher asks for room for one block more than it is given.
SCRATCH_EXTRA_BYTES: Final = 16

_BLOCK_BYTES: Final = 16
_BLOCK_BITS: Final = 128
_LOW_BITS: Final = (1 << _BLOCK_BITS) - 1

#: x^128 = x^7 + x^2 + x + 1.
_FOLDS: Final = (0, 1, 2, 7)

_REVERSED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def can_check_in_pieces(reference: ChunkReference) -> bool:
    """Whether cipher and hash can be fed piece by piece: no codec needs the whole."""
    return reference.codec is Codec.RAW and reference.aead is Aead.AES_256_GCM


class TagCheck:
    """Step 4 of opening for whoever wants the verdict alone. Nothing is decrypted.

    Args:
        key: Root of the chunk's epoch.
        reference: The chunk; :func:`can_check_in_pieces` is true of it.
        associated: The header's bytes.
    """

    __slots__ = ("_correction", "_decryptor", "update")

    #: Takes the next piece of ciphertext.
    update: Callable[[memoryview], None]

    def __init__(
        self, key: EpochKey, reference: ChunkReference, associated: bytes | memoryview
    ) -> None:
        chunk_key = algorithms.AES(key.subkey("chunk", reference.seal_id))
        hash_key = Cipher(chunk_key, modes.CTR(bytes(_BLOCK_BYTES))).encryptor()
        self._correction = length_correction(
            hash_key.update(bytes(_BLOCK_BYTES)), len(associated), reference.encoded_bytes
        )
        self._decryptor = Cipher(chunk_key, modes.GCM(NONCE)).decryptor()
        padding = bytes(-len(associated) % _BLOCK_BYTES)
        self.update = self._decryptor.authenticate_additional_data
        self.update(memoryview(bytes(associated) + padding))

    def finish(self, tag: memoryview, where: str) -> None:
        """Check the tag.

        Raises:
            AuthenticationError: It does not match header and ciphertext.
        """
        expected = int.from_bytes(tag, "little") ^ int.from_bytes(self._correction, "little")
        _require_tag(self._decryptor, expected.to_bytes(_BLOCK_BYTES, "little"), where)


class ContentCheck:
    """Steps 4 and 5, and the content id: the plaintext is hashed and never leaves one piece.

    Args:
        key: Root of the chunk's epoch.
        reference: The chunk; :func:`can_check_in_pieces` is true of it.
        associated: The header's bytes.
        hasher: Of the content id, before the plaintext.
    """

    __slots__ = ("_decryptor", "_hasher", "_reference", "_room")

    def __init__(
        self,
        key: EpochKey,
        reference: ChunkReference,
        associated: bytes | memoryview,
        hasher: blake3,
    ) -> None:
        chunk_key = algorithms.AES(key.subkey("chunk", reference.seal_id))
        self._decryptor = Cipher(chunk_key, modes.GCM(NONCE)).decryptor()
        self._decryptor.authenticate_additional_data(associated)
        self._hasher = hasher
        self._reference = reference
        self._room = memoryview(b"")

    def use(self, room: memoryview) -> None:
        """Decrypt to ``room``, ``SCRATCH_EXTRA_BYTES`` longer than any piece."""
        self._room = room

    def update(self, piece: memoryview) -> None:
        """Take the next piece of ciphertext: at least one byte, and no more than there is room."""
        # Nothing of it is proved before the end: it may be hashed, and nothing else.
        room = self._room
        self._hasher.update(room[: self._decryptor.update_into(piece, room)])

    def finish(self, tag: memoryview, where: str) -> None:
        """Check the tag, then the content id.

        Raises:
            AuthenticationError: One of them does not match.
        """
        _require_tag(self._decryptor, bytes(tag), where)
        require_content_id(self._reference, self._hasher.digest(), where)


def _require_tag(decryptor: AEADDecryptionContext, tag: bytes, where: str) -> None:
    try:
        decryptor.finalize_with_tag(tag)
    except InvalidTag:
        raise AuthenticationError(where, "tag") from None


def length_correction(hash_key: bytes, associated_bytes: int, sealed_bytes: int) -> bytes:
    """What turns a tag over header and ciphertext into one over both as associated data.

    Args:
        hash_key: H, one block.
        associated_bytes: Of the header, which is filled up to whole blocks.
        sealed_bytes: Of the ciphertext.
    """
    filled_bytes = associated_bytes + -associated_bytes % _BLOCK_BYTES
    sealed = _lengths(associated_bytes, sealed_bytes)
    checked = _lengths(filled_bytes + sealed_bytes, 0)
    product = _product(sealed ^ checked, _element(hash_key))
    return product.to_bytes(_BLOCK_BYTES, "little").translate(_REVERSED)


def _lengths(associated_bytes: int, sealed_bytes: int) -> int:
    words = (8 * associated_bytes).to_bytes(8, "big") + (8 * sealed_bytes).to_bytes(8, "big")
    return _element(words)


def _element(block: bytes) -> int:
    """A block as a polynomial over two elements: its first bit is the coefficient of x^0."""
    return int.from_bytes(block.translate(_REVERSED), "little")


def _product(known: int, secret: int) -> int:
    """The product in GCM's field. No branch looks at ``secret``; ``known`` is made of lengths."""
    product = 0
    while known:
        lowest = known & -known
        product ^= secret * lowest
        known ^= lowest
    for _ in range(2):
        high, product = product >> _BLOCK_BITS, product & _LOW_BITS
        for fold in _FOLDS:
            product ^= high << fold
    return product
