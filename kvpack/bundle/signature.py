"""Ed25519 over the stored bytes: integrity and origin for someone who holds no secret.

What is signed::

    "kvpack/v1/sig"
    BLAKE3(header)
    for each object, in file order: its length (8 bytes, little-endian), BLAKE3(object)
    BLAKE3(manifest, its MAC included)

The block in the bundle is the public key (32 bytes), then the signature (64 bytes). It says nothing
about the plaintext except that the signer stored these ciphertexts.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvpack.bundle.footer import SIGNATURE_BYTES
from kvpack.errors import AuthenticationError

_CONTEXT: Final = b"kvpack/v1/sig"
_PUBLIC_BYTES: Final = 32


class SignatureTranscript:
    """Collects what is signed, object by object. Takes 40 bytes of memory for each."""

    def __init__(self, header_bytes: bytes) -> None:
        self._message = bytearray(_CONTEXT + blake3(header_bytes).digest())

    def add_object(self, data: bytes | memoryview) -> None:
        """The next object in file order, as stored."""
        self.add_digest(len(data), blake3(data).digest())

    def add_digest(self, object_bytes: int, digest: bytes) -> None:
        """The next object, hashed by the caller.

        Args:
            object_bytes: Its length.
            digest: BLAKE3 of the object, 32 bytes.
        """
        self._message += object_bytes.to_bytes(8, "little") + digest

    def message(self, manifest_blob: bytes) -> bytes:
        """What is signed, now that the manifest is known."""
        return bytes(self._message) + blake3(manifest_blob).digest()


def sign(signer: Ed25519PrivateKey, message: bytes) -> bytes:
    """The signature block over ``message``."""
    return signer.public_key().public_bytes_raw() + signer.sign(message)


def check_signature(block: bytes, message: bytes, public_key: bytes) -> None:
    """Check a signature block against the signer that is expected.

    Raises:
        AuthenticationError: No block, another signer, or other bytes than were signed.
    """
    if len(block) != SIGNATURE_BYTES:
        raise AuthenticationError("signature", "the pack is not signed")
    if block[:_PUBLIC_BYTES] != public_key:
        raise AuthenticationError("signature", f"the signer is {block[:_PUBLIC_BYTES].hex()[:16]}…")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(block[_PUBLIC_BYTES:], message)
    except InvalidSignature:
        raise AuthenticationError("signature", "not over these bytes") from None
