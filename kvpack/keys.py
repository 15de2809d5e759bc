"""Root keys: one 32-byte secret per tenant and epoch, and one derived key per purpose.

A root never leaves this module except into its key file. Everything else asks for
``key.subkey(purpose, context)``, so no key serves two purposes.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from blake3 import blake3
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC

from kvpack import limits
from kvpack.errors import KeyFileError, LimitError, UnknownKeyError
from kvpack.publish import publish_new

ROOT_BYTES: Final = 32
_INFO_PREFIX: Final = b"kvpack/v1/"
_FILE_TITLE: Final = "kvpack-key-v1"
_FILE_FIELDS: Final = ("tenant", "epoch", "root", "check")
_CHECK_CONTEXT: Final = b"kvpack/v1/key-file"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class EpochKey:
    """The root key of one tenant and epoch. Neither ``repr`` nor an error ever shows the secret.

    Attributes:
        tenant: Whose rows it seals.
        epoch: Counted from 1; a new epoch is a new root.

    Raises:
        LimitError: Tenant or epoch is outside its cap, or the root is not 32 bytes.
    """

    tenant: str
    epoch: int
    _root: bytes
    _expander: HMAC = field(init=False)
    _subkeys: dict[str, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        limits.check_name("key.tenant", self.tenant)
        limits.check_range("key.epoch", self.epoch, 1, limits.EPOCH_MAX)
        if len(self._root) != ROOT_BYTES:
            raise LimitError("key.root", f"{ROOT_BYTES} bytes", f"{len(self._root)} bytes")
        # HKDF-Extract. Tenant and epoch are the salt, so that a root that was copied to another
        # tenant's file by mistake still opens nothing of the first.
        name = self.tenant.encode()
        salt = b"kvpack/v1" + len(name).to_bytes(2, "little") + name
        salt += self.epoch.to_bytes(4, "little")
        extracted = hmac.digest(salt, self._root, "sha256")
        object.__setattr__(self, "_expander", HMAC(extracted, SHA256()))

    def __repr__(self) -> str:
        return f"EpochKey(tenant={self.tenant!r}, epoch={self.epoch})"

    def subkey(self, purpose: str, context: bytes = b"") -> bytes:
        """The 32-byte key for ``purpose`` and ``context``: HKDF-SHA-256 with one output block.

        Args:
            purpose: A word without NUL, such as ``"content-id"``.
            context: What the key is bound to beyond its purpose, such as a seal id.
        """
        if context:
            return self._expand(purpose, context)
        # Without a context there are as many keys as purposes, and some are asked for per chunk.
        if purpose not in self._subkeys:
            self._subkeys[purpose] = self._expand(purpose, b"")
        return self._subkeys[purpose]

    def _expand(self, purpose: str, context: bytes) -> bytes:
        info = _INFO_PREFIX + purpose.encode() + b"\0" + context + b"\x01"
        # A copy of one that is keyed costs less than a new one, and a chunk's key is one of these.
        expander = self._expander.copy()
        expander.update(info)
        return expander.finalize()

    def mac(self, purpose: str, *parts: bytes | memoryview) -> bytes:
        """HMAC-SHA-256 (32 bytes) over the concatenated ``parts`` under ``subkey(purpose)``."""
        digest = hmac.new(self.subkey(purpose), digestmod="sha256")
        for part in parts:
            digest.update(part)
        return digest.digest()

    def _same_root(self, other: EpochKey) -> bool:
        return hmac.compare_digest(self._root, other._root)


class Keyring:
    """The keys one process holds, by tenant and epoch. Immutable.

    Raises:
        KeyFileError: Two different roots for one tenant and epoch.
    """

    def __init__(self, keys: Iterable[EpochKey] = ()) -> None:
        self._keys: dict[tuple[str, int], EpochKey] = {}
        for key in keys:
            held = self._keys.setdefault((key.tenant, key.epoch), key)
            if not held._same_root(key):
                raise KeyFileError(f"two keys for tenant {key.tenant!r}, epoch {key.epoch}")

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[EpochKey]:
        return iter(self._keys.values())

    def get(self, tenant: str, epoch: int) -> EpochKey:
        """The key of ``tenant`` and ``epoch``.

        Raises:
            UnknownKeyError: It is not here.
        """
        key = self._keys.get((tenant, epoch))
        if key is None:
            raise UnknownKeyError(f"no key for tenant {tenant!r}, epoch {epoch}")
        return key


def generate_key(tenant: str, epoch: int = 1) -> EpochKey:
    """A new random root for ``tenant`` and ``epoch``.

    Raises:
        LimitError: Tenant or epoch is outside its cap.
    """
    return EpochKey(tenant, epoch, secrets.token_bytes(ROOT_BYTES))


def write_key_file(path: str | os.PathLike[str], key: EpochKey) -> None:
    """Write ``key`` to a new file: 0600 from birth, durable, never over a file that is there.

    Raises:
        PublishError: The name exists, or the folder or volume refuses.
    """
    text = _render(key.tenant, key.epoch, key._root)
    with publish_new(path) as file:
        file.write(text.encode())


def load_key_file(path: str | os.PathLike[str]) -> EpochKey:
    """Read a key file.

    Raises:
        KeyFileError: It is missing, a link, not a regular file, somebody else's, readable for
            others, or not a key.
    """
    where = Path(path)
    text = read_private(where, _FILE_TITLE)
    lines = text.split("\n")
    names = [line.partition(": ")[0] for line in lines[1:-1]]
    if lines[0] != _FILE_TITLE or tuple(names) != _FILE_FIELDS or lines[-1] != "":
        raise KeyFileError(f"{where}: not a {_FILE_TITLE} file")
    tenant, epoch, root, _ = (line.partition(": ")[2] for line in lines[1:-1])
    try:
        key = EpochKey(tenant, int(epoch), bytes.fromhex(root))
    except (ValueError, LimitError):
        # Neither error may travel on: its text could quote the secret.
        raise KeyFileError(f"{where}: not a {_FILE_TITLE} file: a field is malformed") from None
    expected = _render(key.tenant, key.epoch, key._root)
    if not hmac.compare_digest(expected.encode(), text.encode()):
        raise KeyFileError(f"{where}: mistyped or damaged: the check does not match")
    return key


def load_keyring(folder: str | os.PathLike[str]) -> Keyring:
    """All key files of ``folder`` whose names end in ``.key``.

    Raises:
        KeyFileError: The folder cannot be read, one of them cannot be used, or two contradict.
    """
    try:
        paths = sorted(path for path in Path(folder).iterdir() if path.name.endswith(".key"))
    except OSError as error:
        raise KeyFileError(f"{os.fspath(folder)}: {error.strerror}") from error
    return Keyring(load_key_file(path) for path in paths)


def _render(tenant: str, epoch: int, root: bytes) -> str:
    """The whole file. The check finds slips of a hand that typed a root from paper."""
    head = f"{_FILE_TITLE}\ntenant: {tenant}\nepoch: {epoch}\nroot: {root.hex()}\n"
    return f"{head}check: {blake3(_CHECK_CONTEXT + head.encode()).hexdigest(4)}\n"


def read_private(path: Path, title: str) -> str:
    """The text of a small file that nobody else can read.

    Args:
        path: Which file. A link is refused, a FIFO not waited for.
        title: What kind of file it should be, for the message.

    Raises:
        KeyFileError: It is missing, a link, not a regular file, somebody else's, readable for
            others, too long, or not text.
    """
    # O_NONBLOCK: a FIFO of that name must be refused, not waited for.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise KeyFileError(f"{path}: {why}") from error
    except ValueError as error:
        raise KeyFileError(f"{os.fspath(path)!r}: not a file name") from error
    try:
        _check_private(path, os.fstat(descriptor))
        content = os.read(descriptor, limits.KEY_FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise KeyFileError(f"{path}: not a {title} file") from None


def _check_private(path: Path, status: os.stat_result) -> None:
    """Judge the open file, not its name: the name could be changed between check and use."""
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path}: not a regular file")
    if status.st_uid != os.geteuid():
        raise KeyFileError(f"{path}: owned by user {status.st_uid}, expected {os.geteuid()}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise KeyFileError(f"{path}: mode {mode:04o} lets others in, expected 0600")
    if not 0 < status.st_size <= limits.KEY_FILE_BYTES_MAX:
        raise KeyFileError(f"{path}: {status.st_size} bytes is no key file")
