"""Section 2: keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from blake3 import blake3

from tests.reference.verdict import Refused, need

#: Roots by tenant and epoch.
Roots = dict[tuple[str, int], bytes]

_FILE = re.compile(
    rb"(kvpack-key-v1\ntenant: ([^\n]+)\nepoch: ([1-9][0-9]{0,9})\nroot: ([0-9a-f]{64})\n)"
    rb"check: ([0-9a-f]{8})\n"
)


def subkey(roots: Roots, tenant: str, epoch: int, purpose: str, context: bytes = b"") -> bytes:
    """The key of one purpose.

    Raises:
        Refused: ``unknown_key``.
    """
    root = roots.get((tenant, epoch))
    if root is None:
        raise Refused("unknown_key", "key", f"no key of epoch {epoch}")
    name = tenant.encode()
    salt = b"kvpack/v1" + len(name).to_bytes(2, "little") + name + epoch.to_bytes(4, "little")
    extracted = hmac.digest(salt, root, hashlib.sha256)
    info = b"kvpack/v1/" + purpose.encode() + b"\0" + context
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def load_key_file(path: Path) -> Roots:
    """The one key of a key file.

    Raises:
        OSError: It cannot be read.
        Refused: ``bad_key_file``.
    """
    with path.open("rb") as file:
        text = file.read(1025)
    found = _FILE.fullmatch(text)
    if len(text) > 1024 or found is None:
        raise Refused("bad_key_file", "key", "not a key file")
    body, tenant, epoch, root, check = found.groups()
    slip = blake3(b"kvpack/v1/key-file" + body).digest()[:4].hex().encode() != check
    need(not slip and 0 < int(epoch) < 2**31, "key", "check or epoch is wrong", "bad_key_file")
    return {(tenant.decode(), int(epoch)): bytes.fromhex(root.decode())}
