"""API keys: who a caller is. A key itself is stored nowhere, only its SHA-256.

A key has 256 random bits, so its digest cannot be searched through and needs no salt; comparing
digests by a table tells a stranger nothing about a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.errors import KvpackError
from node.errors import CredentialsError, UsageError
from node.files import read_private, replace_private, write_private
from node.http.access import Caller

log = logging.getLogger(__name__)

_KEY_BYTES: Final = 32
_KEY_PREFIX: Final = "kvp-"
_ADMIN: Final = "admin"

#: One path component on every file system: the tenant's key file is named by it.
_TENANT: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

#: A line of a key file: tenant, SHA-256 of the key in hex, and perhaps the word ``admin``.
_LINE: Final = re.compile(r"([^:\s]+):([0-9a-f]{64})(:admin)?")


def check_tenant(name: str) -> str:
    """``name``, if it can be a tenant's.

    Raises:
        UsageError: It cannot.
    """
    if not _TENANT.fullmatch(name):
        raise UsageError(
            f"tenant {name!r}: expected 1 to 63 of a-z, 0-9, dot, hyphen, underscore; "
            "first a letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True, repr=False)
class ApiKeys:
    """Who has which key.

    Attributes:
        callers: By the SHA-256 of the key.
    """

    callers: Mapping[bytes, Caller]

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.callers)} keys)"

    @classmethod
    def parse(cls, text: str, where: str) -> ApiKeys:
        """Read ``tenant:sha256-of-key-hex`` lines, with ``:admin`` behind those who may see all.

        Raises:
            CredentialsError: A line is another thing, or no line is there. Quotes none.
        """
        callers: dict[bytes, Caller] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            found = _LINE.fullmatch(line.strip())
            if found is None or not _TENANT.fullmatch(found[1]):
                raise CredentialsError(f"{where}: line {number}: expected tenant:sha256-of-key-hex")
            callers[bytes.fromhex(found[2])] = Caller(found[1], found[3] is not None)
        if not callers:
            raise CredentialsError(f"{where}: no key is in it, so nobody could call")
        return cls(callers)

    def caller(self, key: str) -> Caller | None:
        """Whose ``key`` is; None: nobody's."""
        return self.callers.get(hashlib.sha256(key.encode()).digest())


class LiveKeys:
    """The keys of a file as they are now: a key that is taken out is refused from then on.

    A file that cannot be read any more lets nobody in.

    Raises:
        CredentialsError: The file cannot be used at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._look()
        self._keys = _read(path)

    def caller(self, key: str) -> Caller | None:
        """Whose ``key`` is; None: nobody's."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = _read(self._path)
                log.info("%s: read again, %d keys", self._path, len(self._keys.callers))
            except KvpackError as error:
                self._keys = ApiKeys({})
                log.error("nobody is let in: %s", error)
        return self._keys.caller(key)

    def _look(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return status.st_ino, status.st_mtime_ns, status.st_size


def key_of(authorization: str) -> str:
    """The key in an ``Authorization`` header; empty where there is none.

    ``Bearer KEY`` is what clients send; ``Basic`` with the key as password is what a browser can.
    """
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def add_key(path: Path, tenant: str, *, is_admin: bool = False) -> str:
    """Make a key for ``tenant``, put its digest into the file, and return the key itself.

    Raises:
        UsageError: The name cannot be a tenant's.
        CredentialsError: The file cannot be used.
    """
    check_tenant(tenant)
    key = _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()
    line = f"{tenant}:{digest}{':' + _ADMIN if is_admin else ''}\n"
    if not path.exists():
        write_private(path, line.encode())
        return key
    before = _text(path)
    ApiKeys.parse(before + line, str(path))
    if before and not before.endswith("\n"):
        before += "\n"
    replace_private(path, (before + line).encode())
    return key


def _read(path: Path) -> ApiKeys:
    return ApiKeys.parse(_text(path), str(path))


def _text(path: Path) -> str:
    if not path.exists():
        raise CredentialsError(f"{path}: no such file; kvnode apikey add makes it")
    try:
        return read_private(path).decode()
    except UnicodeDecodeError:
        raise CredentialsError(f"{path}: no text") from None
