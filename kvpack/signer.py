"""Signer keys: Ed25519, for packs that are checked by someone who holds no secret.

The private file is a secret like a root key: 0600, opened without following links. The public file
is none, and goes to whoever verifies.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Final

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvpack import limits
from kvpack.errors import KeyFileError, PublishError
from kvpack.keys import read_private
from kvpack.publish import publish_new

PRIVATE_TITLE: Final = "kvpack-signer-v1"
PUBLIC_TITLE: Final = "kvpack-signer-public-v1"
PUBLIC_SUFFIX: Final = ".pub"
_KEY_BYTES: Final = 32
_CHECK_CONTEXT: Final = b"kvpack/v1/signer-file"


def generate_signer() -> Ed25519PrivateKey:
    """A new random signer."""
    return Ed25519PrivateKey.generate()


def public_path(path: str | os.PathLike[str]) -> Path:
    """Where the public file of the private file ``path`` lies."""
    return Path(os.fspath(path) + PUBLIC_SUFFIX)


def write_signer_files(path: str | os.PathLike[str], signer: Ed25519PrivateKey) -> Path:
    """Write ``path`` and, beside it, the public file. Returns the latter's path.

    Raises:
        PublishError: One of the names exists, or the folder or volume refuses.
    """
    public = public_path(path)
    if os.path.lexists(public):
        # Asked first, so that no private file is left behind without its public one.
        raise PublishError(f"{public}: cannot publish: the name exists already")
    with publish_new(path) as file:
        file.write(_render(PRIVATE_TITLE, signer.private_bytes_raw()))
    with publish_new(public) as file:
        file.write(_render(PUBLIC_TITLE, signer.public_key().public_bytes_raw()))
    return public


def load_signer(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """Read a private signer file.

    Raises:
        KeyFileError: It is missing, a link, somebody else's, readable for others, or no signer.
    """
    text = read_private(Path(path), PRIVATE_TITLE)
    return Ed25519PrivateKey.from_private_bytes(_parse(path, PRIVATE_TITLE, text))


def load_public_signer(path: str | os.PathLike[str]) -> bytes:
    """Read a public signer file: 32 bytes. It is no secret, so links and modes do not matter.

    Raises:
        KeyFileError: It is missing, or no public signer file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a file name"
        raise KeyFileError(f"{os.fspath(path)}: {why}") from error
    try:
        content = os.read(descriptor, limits.KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise KeyFileError(f"{os.fspath(path)}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return _parse(path, PUBLIC_TITLE, content.decode(errors="replace"))


def _render(title: str, key: bytes) -> bytes:
    head = f"{title}\nkey: {key.hex()}\n"
    return f"{head}check: {blake3(_CHECK_CONTEXT + head.encode()).hexdigest(4)}\n".encode()


def _parse(path: str | os.PathLike[str], title: str, text: str) -> bytes:
    lines = text.split("\n")
    where = os.fspath(path)
    if lines[0] == PRIVATE_TITLE and title == PUBLIC_TITLE:
        raise KeyFileError(f"{where}: a private signer file, expected its public one")
    if lines[0] != title or len(lines) != 4 or not lines[1].startswith("key: "):
        raise KeyFileError(f"{where}: not a {title} file")
    try:
        key = bytes.fromhex(lines[1].removeprefix("key: "))
    except ValueError:
        # The error must not travel on: its text could quote the secret.
        raise KeyFileError(f"{where}: not a {title} file: the key is malformed") from None
    if len(key) != _KEY_BYTES:
        raise KeyFileError(f"{where}: not a {title} file: the key is malformed")
    if not hmac.compare_digest(_render(title, key), text.encode()):
        raise KeyFileError(f"{where}: mistyped or damaged: the check does not match")
    return key
