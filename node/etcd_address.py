"""``etcd://…``: which etcd, which part of its keys, and by which certificates.

``etcd://HOST[:PORT],…[?prefix=P&server_name=N&ca=FILE&cert=FILE&key=FILE]``; without files the
node's own credentials are used, both to show and to check. ``tls=off`` speaks plain text, to
loopback only: whoever reads along elsewhere could write, too.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

from node.config import Address
from node.errors import UsageError

PORT: Final = 2379
PREFIX: Final = "kvpack"

#: An etcd has 3 or 5 members; more addresses than that are a mistake.
MEMBERS_MAX: Final = 9

_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_PREFIX_BYTES_MAX: Final = 200
_FILES: Final = ("ca", "cert", "key")
_KNOWN: Final = frozenset({"prefix", "server_name", "tls", *_FILES})


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Authority, certificate and key as PEM files."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Where a directory's etcd is.

    Attributes:
        members: Where to ask; any of them answers for all.
        prefix: What its keys begin with.
        server_name: What the members' certificates name instead of their hosts; may be empty.
        files: Certificates from files; None: the node's own credentials.
        plain: No TLS at all.

    Raises:
        UsageError: A part is missing, unknown, or not permitted together with another.
    """

    members: tuple[Address, ...]
    prefix: str = PREFIX
    server_name: str = ""
    files: TlsFiles | None = None
    plain: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.members) <= MEMBERS_MAX:
            raise UsageError(
                f"etcd: expected 1 to {MEMBERS_MAX} members, found {len(self.members)}"
            )
        if len(set(self.members)) != len(self.members):
            raise UsageError("etcd: a member is named twice")
        if not _PREFIX.fullmatch(self.prefix) or len(self.prefix) > _PREFIX_BYTES_MAX:
            raise UsageError(
                f"etcd: prefix {self.prefix!r}: expected words of A-Z, a-z, 0-9, dot, hyphen and "
                "underscore with / between"
            )
        if self.plain and (self.files is not None or self.server_name):
            raise UsageError("etcd: tls=off and certificates exclude each other")
        for member in self.members if self.plain else ():
            if not _is_loopback(member.host):
                raise UsageError(f"etcd: member {member}: tls=off is for loopback only")

    @classmethod
    def parse(cls, url: str) -> EtcdAddress:
        """Read ``etcd://…``."""
        where, _, query = url.removeprefix("etcd://").partition("?")
        if not url.startswith("etcd://") or not where or "@" in where or "/" in where:
            raise UsageError(f"directory {url!r}: expected etcd://HOST[:PORT],…[?prefix=P&…]")
        found = _options(url, query)
        return cls(
            tuple(_member(text) for text in where.split(",")),
            found.get("prefix", PREFIX),
            found.get("server_name", ""),
            TlsFiles(*(Path(found[name]) for name in _FILES)) if "ca" in found else None,
            "tls" in found,
        )

    def inside(self, name: str) -> EtcdAddress:
        """The same etcd, with keys of their own below these."""
        prefix = f"{self.prefix}/{name}"
        return EtcdAddress(self.members, prefix, self.server_name, self.files, self.plain)


def _member(text: str) -> Address:
    bracketed = text.startswith("[") and text.endswith("]")
    if bracketed or ":" not in text:
        text = f"{text}:{PORT}"
    address = Address.parse(text)
    if address.port == 0:
        raise UsageError(f"etcd: member {text!r}: expected a port of 1 to 65535")
    return address


def _options(url: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise UsageError(f"directory {url!r}: what follows ? is not name=value&…") from error
    found = dict(pairs)
    unknown = sorted(set(found) - _KNOWN)
    if unknown or len(found) != len(pairs) or not all(found.values()):
        what = f"unknown {unknown[0]!r}" if unknown else "a name without a value, or given twice"
        raise UsageError(f"directory {url!r}: {what}; known are {', '.join(sorted(_KNOWN))}")
    if found.get("tls", "off") != "off":
        raise UsageError(f"directory {url!r}: tls is on unless it says tls=off")
    if len([name for name in _FILES if name in found]) not in (0, len(_FILES)):
        raise UsageError(f"directory {url!r}: expected ca, cert and key together, or none of them")
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
