"""Keys and values of the ``etcd:`` directory (migration-v1.md, 8.6), and what they say together.

Of a session three keys may stand: its entry, the same entry under its owner's name (so that a
node's sessions are found without reading all), and its published value; or a tombstone. The two of
an entry are written in one step, so both were last written at one revision: the token's.

Values are JSON: ``etcdctl get`` shows them to a person. Fields that are not known are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from kvpack import limits
from kvpack.errors import LimitError
from node.directory import (
    DirectoryState,
    Ownership,
    OwnershipToken,
    Published,
    Record,
    Released,
)
from node.errors import DirectoryError

_V = TypeVar("_V")

FORMAT: Final = 1


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``directory``: which one it is, and in which etcd it was made or adopted."""

    format: int
    id: bytes
    generation: int
    cluster: int


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``session/ID`` and ``owned/NODE/ID``."""

    node: str
    nonce: bytes


class Tombstone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``released/ID``."""

    node: str
    generation: int
    revision: int


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``value/ID``."""

    generation: int
    revision: int
    value: bytes


class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Value of ``node/NAME``: which process holds the lease; ``incarnation`` empty: none yet."""

    incarnation: bytes
    ttl_s: int


def encoded(value: msgspec.Struct) -> bytes:
    """A value as it is kept."""
    return msgspec.json.encode(value)


def decoded(kind: type[_V], key: str, content: bytes) -> _V:
    """A value that was read.

    Raises:
        DirectoryError: Something else stands there.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise DirectoryError(f"directory: key {key}: not a kvpack directory's: {error}") from error


class Keys:
    """The keys below one prefix."""

    def __init__(self, prefix: str) -> None:
        self.all = f"{prefix}/"
        self.directory = f"{prefix}/directory"
        self.released = f"{prefix}/released/"
        self.nodes = f"{prefix}/node/"

    def session(self, session_id: str) -> str:
        return f"{self.all}session/{session_id}"

    def tombstone(self, session_id: str) -> str:
        return f"{self.released}{session_id}"

    def value(self, session_id: str) -> str:
        return f"{self.all}value/{session_id}"

    def owned(self, node: str, session_id: str = "") -> str:
        return f"{self.all}owned/{quote(node, safe='')}/{session_id}"

    def holder(self, node: str) -> str:
        return f"{self.nodes}{quote(node, safe='')}"

    def lease(self, node: str) -> str:
        return f"{self.all}lease/{quote(node, safe='')}"


def end_of(prefix: str) -> str:
    """The key after all that begin with ``prefix``, whose last character is a slash."""
    return f"{prefix[:-1]}{chr(ord(prefix[-1]) + 1)}"


def after(key: str) -> str:
    """The first key that can come after ``key``."""
    return f"{key}\0"


def key_values(answers: Iterable[Any]) -> list[list[Any]]:
    """What each read of an answer found."""
    return [list(one.response_range.kvs) for one in answers]


@dataclass(frozen=True, slots=True)
class View:
    """What stands of one session at one moment.

    Attributes:
        state: The directory; its revision is the etcd's at that moment.
        written: Revision at which the directory's identity was last written.
        record: The entry or tombstone.
    """

    state: DirectoryState
    written: int
    record: Record | None


def read_identity(keys: Keys, found: list[Any]) -> tuple[Identity, int] | None:
    """Identity and its revision; None where there is no directory yet.

    Raises:
        DirectoryError: Something else stands there.
    """
    if not found:
        return None
    identity = decoded(Identity, keys.directory, found[0].value)
    if identity.format != FORMAT:
        raise DirectoryError(
            f"directory: key {keys.directory}: format {identity.format}, expected {FORMAT}"
        )
    return identity, found[0].mod_revision


def read_entry(identity: Identity, session_id: str, key_value: Any) -> Ownership:  # noqa: ANN401
    """An entry, from either of its keys."""
    entry = decoded(Entry, key_value.key.decode(errors="replace"), key_value.value)
    token = token_of(identity, key_value.mod_revision)
    try:
        return Ownership(session_id, limits.check_name("node", entry.node), token, entry.nonce)
    except LimitError as error:
        raise DirectoryError(f"directory: session {session_id}: {error}") from error


def read_tombstone(identity: Identity, session_id: str, key_value: Any) -> Released:  # noqa: ANN401
    """A tombstone."""
    kept = decoded(Tombstone, key_value.key.decode(errors="replace"), key_value.value)
    token = token_of(identity, kept.revision, kept.generation)
    return Released(session_id, kept.node, token, key_value.mod_revision)


def read_value(identity: Identity, key_value: Any) -> Published:  # noqa: ANN401
    """A published value."""
    kept = decoded(Value, key_value.key.decode(errors="replace"), key_value.value)
    return Published(token_of(identity, kept.revision, kept.generation), kept.value)


def token_of(identity: Identity, revision: int, generation: int = 0) -> OwnershipToken:
    """A token of this directory, of the present generation unless another is named.

    Raises:
        DirectoryError: A field is outside its range.
    """
    try:
        return OwnershipToken(identity.id, generation or identity.generation, revision)
    except LimitError as error:
        raise DirectoryError(f"directory: {error}") from error
