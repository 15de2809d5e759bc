"""A payload in messages of the size that gRPC carries best, plain or each sealed by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: The fastest size that was measured (limits of the data plane, section 4).
MESSAGE_BYTES = 2 << 20

SEALED = "each message sealed, bound to nothing"

TAG_BYTES = 16

_KEY = bytes(range(32))


def cut(payload: Any, *, sealed: bool) -> list[bytes]:
    """The messages, in order. Sealed by AES-256-GCM, each with its number as its nonce."""
    view = memoryview(payload)
    plain = [view[start : start + MESSAGE_BYTES] for start in range(0, len(view), MESSAGE_BYTES)]
    if not sealed:
        return [bytes(piece) for piece in plain]
    cipher = _cipher()
    return [cipher.encrypt(_nonce(number), piece, b"") for number, piece in enumerate(plain)]


def placing(buffer: Any, *, sealed: bool) -> Callable[[Any], None]:
    """What takes the messages, in order, and puts each where it belongs in ``buffer``."""
    view, at, number = memoryview(buffer), 0, 0
    cipher = _cipher() if sealed else None

    def place(message: Any) -> None:
        nonlocal at, number
        if cipher is None:
            end = at + len(message)
            view[at:end] = message
        else:
            end = at + len(message) - TAG_BYTES
            cipher.decrypt_into(_nonce(number), message, b"", view[at:end])
        at, number = end, number + 1

    return place


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


def _cipher() -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_KEY)
