"""The key agreement of a pairing: what is computed, without I/O.

Each side makes a fresh X25519 key and a nonce. The joiner commits to its own before it sees the
listener's, and opens the commitment afterwards. Both derive keys and a short code from the shared
secret and all three messages. Whoever sits in between holds two different agreements, and at the
moment at which it has fixed its part of either one, a value that it has not seen yet makes the code
of that one random: it has one guess in a million, and a wrong one shows on both terminals.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from node.errors import PairError, PairRefusedError

#: First bytes of both first messages: protocol and version.
MAGIC: Final = b"kvpack-pair-v1\0\0"

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 32
SHARE_BYTES: Final = KEY_BYTES + NONCE_BYTES
COMMITMENT_BYTES: Final = 32

#: Lengths of the three messages.
FIRST_BYTES: Final = len(MAGIC) + COMMITMENT_BYTES
SECOND_BYTES: Final = len(MAGIC) + SHARE_BYTES
THIRD_BYTES: Final = SHARE_BYTES

#: The code has six decimal digits.
CODES: Final = 1_000_000

_COMMIT: Final = b"kvpack/pair/v1/commit\0"
_TRANSCRIPT: Final = b"kvpack/pair/v1/transcript\0"
_KEYS: Final = b"kvpack/pair/v1/keys"
_PROOF: Final = b"kvpack/pair/v1/proof\0"
_CODE_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Share:
    """One side's fresh part: an X25519 key and a nonce. Used for one agreement only."""

    nonce: bytes
    key: X25519PrivateKey = field(repr=False)

    @classmethod
    def draw(cls) -> Share:
        """A fresh one."""
        return cls(secrets.token_bytes(NONCE_BYTES), X25519PrivateKey.generate())

    @property
    def public(self) -> bytes:
        """What is sent: public key, then nonce, 64 bytes."""
        raw = self.key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        return raw + self.nonce


@dataclass(frozen=True, slots=True)
class Agreement:
    """What both sides hold after the three messages.

    Attributes:
        code: Six digits for two people to compare.
        transcript: SHA-256 over the three messages, 32 bytes.
        to_listener: AEAD key of what the joiner sends.
        to_joiner: AEAD key of what the listener sends.
    """

    code: str
    transcript: bytes
    to_listener: bytes = field(repr=False)
    to_joiner: bytes = field(repr=False)

    def proof_input(self, *, joiner: bool) -> bytes:
        """What a side signs with its certificate's key: it is here, now, in this role."""
        return _PROOF + (b"joiner\0" if joiner else b"listener\0") + self.transcript


def commit(share_public: bytes) -> bytes:
    """The commitment to a share: it hides it (the nonce is unknown) and binds to it."""
    return hashlib.sha256(_COMMIT + share_public).digest()


def first_message(share: Share) -> bytes:
    """Joiner to listener: a commitment to what the third message will say."""
    return MAGIC + commit(share.public)


def second_message(share: Share) -> bytes:
    """Listener to joiner: its share in the open."""
    return MAGIC + share.public


def third_message(share: Share) -> bytes:
    """Joiner to listener: its share, which opens the commitment."""
    return share.public


def check_magic(message: bytes) -> None:
    """Refuse a first message of something else.

    Raises:
        PairError: It is not of this protocol and version.
    """
    if not message.startswith(MAGIC):
        raise PairError("the other side does not speak kvnode pair, version 1")


def agree(share: Share, first: bytes, second: bytes, third: bytes, *, joiner: bool) -> Agreement:
    """Keys and code from the three messages as this side sent and received them.

    Raises:
        PairError: Wrong lengths or version.
        PairRefusedError: The commitment is not to the third message, or a key is degenerate.
    """
    if (len(first), len(second), len(third)) != (FIRST_BYTES, SECOND_BYTES, THIRD_BYTES):
        raise PairError("the key agreement has messages of wrong lengths")
    check_magic(first)
    check_magic(second)
    if not hmac.compare_digest(first[len(MAGIC) :], commit(third)):
        raise PairRefusedError("the other side changed its key after it had seen ours")
    other = second[len(MAGIC) :][:KEY_BYTES] if joiner else third[:KEY_BYTES]
    try:
        secret = share.key.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError as error:
        raise PairRefusedError("the other side sent a key that gives no secret") from error
    transcript = hashlib.sha256(_TRANSCRIPT + first + second + third).digest()
    length = 2 * KEY_BYTES + _CODE_BYTES
    derived = HKDF(hashes.SHA256(), length, salt=transcript, info=_KEYS).derive(secret)
    # 2^64 is no multiple of a million: the most likely code is so by less than one in 10^13.
    number = int.from_bytes(derived[2 * KEY_BYTES :], "little") % CODES
    return Agreement(
        code=f"{number // 1000:03d} {number % 1000:03d}",
        transcript=transcript,
        to_listener=derived[:KEY_BYTES],
        to_joiner=derived[KEY_BYTES : 2 * KEY_BYTES],
    )


class Box:
    """One direction of the channel: ChaCha20-Poly1305 under a counter, so order is checked, too.

    A key is used for one direction of one agreement, and a number only once.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._number = 0

    def seal(self, content: bytes) -> bytes:
        """Encrypt the next message."""
        return self._cipher.encrypt(self._next(), content, None)

    def open(self, sealed: bytes) -> bytes:
        """Decrypt the next message.

        Raises:
            PairRefusedError: It was changed, or is not the next one.
        """
        try:
            return self._cipher.decrypt(self._next(), sealed, None)
        except InvalidTag as error:
            raise PairRefusedError("a message of the other side was changed on the way") from error

    def _next(self) -> bytes:
        number = self._number
        self._number += 1
        return number.to_bytes(12, "little")
