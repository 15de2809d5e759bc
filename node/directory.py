"""Who owns which session. The one place where ownership changes hands.

A directory keeps one entry for each session: the owning node and the revision of the write that
made it owner. Every change compares the whole token, so of two that start from one token exactly
one happens. Its compare-and-swap is the commit point of every move.

An owner that gives its session up leaves a tombstone (:class:`Released`). So an id that the
directory does not know was never claimed, or the directory lost it: that proves nothing about
who owns it, and whoever waits for an answer goes on waiting.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

from kvpack import limits
from node.config import Address
from node.errors import (
    DirectoryAmbiguousError,
    DirectoryError,
    StaleTokenError,
    UsageError,
)

if TYPE_CHECKING:
    from node.credentials import CredentialsSource

DIRECTORY_ID_BYTES: Final = 16
NONCE_BYTES: Final = 16
INCARNATION_BYTES: Final = 16

#: A guarded value: a reference to a published cut, not the cut. One page of the database.
VALUE_BYTES_MAX: Final = 4096

#: Leases that a directory grants.
LEASE_S_MIN: Final = 0.5
LEASE_S_MAX: Final = 600.0

#: The longest single wait for a change.
WATCH_S_MAX: Final = 60.0

#: How a directory is named.
KINDS: Final = "sqlite:PATH, grpc://NODE@HOST:PORT or etcd://HOST,HOST,…"

_COUNTER_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class OwnershipToken:
    """Proof of ownership of one session, as of one write to one directory.

    Attributes:
        directory_id: 16 bytes, drawn when the directory was made.
        generation: Raised when a directory is restored or replaced.
        revision: Raised by every claim, transfer and resume of any session.

    Raises:
        LimitError: A field is outside its range.
    """

    directory_id: bytes
    generation: int
    revision: int

    def __post_init__(self) -> None:
        length = len(self.directory_id)
        limits.check_range("token.directory_id", length, 16, 16, "bytes")
        limits.check_range("token.generation", self.generation, 1, _COUNTER_MAX)
        limits.check_range("token.revision", self.revision, 1, _COUNTER_MAX)

    def newer_than(self, other: OwnershipToken) -> bool:
        """Whether this token was made after ``other``, by (generation, revision)."""
        return (self.generation, self.revision) > (other.generation, other.revision)


@dataclass(frozen=True, slots=True)
class Ownership:
    """One entry: who owns the session, by which token, and the nonce of the write that said so."""

    session_id: str
    node: str
    token: OwnershipToken
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Released:
    """A tombstone: the session's owner gave it up, and nobody has claimed it since.

    Attributes:
        session_id: Which.
        last_node: Its last owner.
        token: The token that it was released under.
        released_revision: Revision of the release itself.
    """

    session_id: str
    last_node: str
    token: OwnershipToken
    released_revision: int


#: What a directory knows of a session id. None beside it: it does not know the id.
Record: TypeAlias = Ownership | Released


@dataclass(frozen=True, slots=True)
class Published:
    """A value that an owner wrote under its token: a reference to its last published cut."""

    token: OwnershipToken
    value: bytes


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """Which directory it is and how far it has come. ``revision`` is 0 where nothing happened."""

    directory_id: bytes
    generation: int
    revision: int

    def __post_init__(self) -> None:
        limits.check_range("directory.id", len(self.directory_id), 16, 16, "bytes")
        limits.check_range("directory.generation", self.generation, 1, _COUNTER_MAX)
        limits.check_range("directory.revision", self.revision, 0, _COUNTER_MAX)


@dataclass(frozen=True, slots=True)
class NodeLease:
    """A node's lease as the directory sees it; ``left_s`` is 0 where it is over."""

    node: str
    incarnation: bytes
    left_s: float


class Directory(Protocol):
    """What a node needs of a directory. Every method may raise :class:`DirectoryError`.

    A write whose reply was lost raises :class:`DirectoryAmbiguousError`; :func:`settle` then says
    what became of it, by its nonce. Every write may be repeated: what it asks for and finds done by
    its own nonce or token it reports as done.
    """

    async def state(self) -> DirectoryState:
        """Which directory this is, and how far it has come."""
        ...

    async def owner(self, session_id: str) -> Record | None:
        """The session's entry or tombstone; None where the directory does not know the id."""
        ...

    async def watch(self, session_id: str, seen: Record | None, timeout_s: float) -> Record | None:
        """What :meth:`owner` gives, as soon as it is not ``seen``, or after ``timeout_s``."""
        ...

    async def claim(self, session_id: str, node: str, nonce: bytes) -> OwnershipToken:
        """Make ``node`` the owner of a session that nobody owns.

        Raises:
            SessionExistsError: Somebody owns it.
        """
        ...

    async def transfer(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        """Make ``node`` the owner if ``token`` is still the current one.

        With the present owner as ``node`` this is how an owner resumes: the revision rises, and
        every other write that starts from ``token`` fails.

        Raises:
            StaleTokenError: ``token`` is not the current one, or nobody owns the session.
        """
        ...

    async def takeover(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        """Like :meth:`transfer`, but from an owner that did not agree: its lease must be over.

        Raises:
            LeaseLiveError: It is not.
            StaleTokenError: ``token`` is not the current one, or nobody owns the session.
        """
        ...

    async def release(self, session_id: str, token: OwnershipToken) -> None:
        """Replace the session's entry by a tombstone if ``token`` is still the current one.

        Raises:
            StaleTokenError: It is not.
        """
        ...

    async def put(self, session_id: str, token: OwnershipToken, value: bytes) -> None:
        """Keep ``value``, up to 4,096 bytes, with the session if ``token`` is the current one.

        It stays when ownership changes hands, until the next owner replaces it; a release or a
        fresh claim removes it.

        Raises:
            StaleTokenError: It is not.
        """
        ...

    async def published(self, session_id: str) -> Published | None:
        """The value that was put last, and under which token."""
        ...

    async def owned_by(self, node: str) -> list[Ownership]:
        """All entries of ``node``, by session id."""
        ...

    async def register(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        """Begin the lease of ``node``, whoever holds it: a process that was started again."""
        ...

    async def renew(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        """Extend the lease by ``ttl_s`` from now. Moves no token. Also after it was over.

        Raises:
            LeaseLostError: Another process registered under that name since.
        """
        ...

    async def expire(self, node: str, incarnation: bytes) -> None:
        """End the lease of a node that stops. Does nothing where another process holds it."""
        ...

    async def lease(self, node: str) -> NodeLease | None:
        """The lease of ``node``, or None where it never registered."""
        ...

    async def close(self) -> None:
        """Give up files and connections."""
        ...


@runtime_checkable
class Adoptable(Protocol):
    """A directory that can be adopted from here; that of another node cannot."""

    async def state(self) -> DirectoryState:
        """Which directory this is, and how far it has come."""
        ...

    async def adopt(self, above: int = 0) -> DirectoryState:
        """Make every token that was given out so far stale; rise over generation ``above``, too."""
        ...


def check_value(value: bytes) -> bytes:
    """Return ``value`` if it may be kept with a session.

    Raises:
        LimitError: It is too long.
    """
    limits.check_range("directory.value", len(value), 0, VALUE_BYTES_MAX, "bytes")
    return value


def lease_ms(ttl_s: float) -> int:
    """``ttl_s`` in milliseconds, if a directory grants such a lease.

    Raises:
        LimitError: It does not.
    """
    low, high = round(LEASE_S_MIN * 1000), round(LEASE_S_MAX * 1000)
    return limits.check_range("lease.ttl", round(ttl_s * 1000), low, high, "ms")


def require_current(record: Record | None, session_id: str, token: OwnershipToken) -> Ownership:
    """The entry, if ``token`` is the one that it is owned by.

    Raises:
        StaleTokenError: It is not, or there is no entry.
    """
    if not isinstance(record, Ownership):
        raise StaleTokenError(f"session {session_id}: nobody owns it")
    if record.token.generation != token.generation:
        raise StaleTokenError(
            f"session {session_id}: generation {token.generation} is not the present one, "
            f"{record.token.generation}"
        )
    if record.token != token:
        raise StaleTokenError(
            f"session {session_id}: revision {token.revision} is not the current one"
        )
    return record


class Whose(enum.Enum):
    """What a directory's answer says to a node that owned a session by some token."""

    OURS = "ours"
    OTHERS = "others"  # somebody else owns it, or owned it last and gave it up
    UNKNOWN = "unknown"  # no proof of anything: another directory, an older one, a lost entry


def whose(record: Record | None, node: str, token: OwnershipToken) -> Whose:
    """What ``record`` says to ``node``, which knows that it owned the session by ``token``.

    Only what is not older than ``token`` is proof. A tombstone under ``token`` itself is: only its
    owner can have written it, and nobody can start from that token any more.
    """
    if record is None or record.token.directory_id != token.directory_id:
        return Whose.UNKNOWN
    if token.newer_than(record.token):
        return Whose.UNKNOWN
    if isinstance(record, Released) or record.node != node:
        return Whose.OTHERS
    return Whose.OURS


async def transfer_settled(
    directory: Directory, session_id: str, token: OwnershipToken, node: str, nonce: bytes
) -> OwnershipToken:
    """Like :meth:`Directory.transfer`, but an ambiguous reply is settled at once.

    Raises:
        StaleTokenError: The transfer did not happen and cannot any more.
        DirectoryAmbiguousError: Settling failed too: still nobody knows.
        DirectoryError: The directory cannot be reached and nothing was written.
    """
    try:
        return await directory.transfer(session_id, token, node, nonce)
    except DirectoryAmbiguousError:
        return await settle(directory, session_id, token, node, nonce)


async def settle(
    directory: Directory, session_id: str, token: OwnershipToken, node: str, nonce: bytes
) -> OwnershipToken:
    """Find out whether a transfer happened, and make it happen where it still can.

    The first write may even arrive while this runs: a transfer that finds its own nonce in the
    entry reports success, so the two are one.

    Raises:
        StaleTokenError: It did not happen and cannot any more.
        DirectoryAmbiguousError: Still nobody knows.
    """
    try:
        entry = await directory.owner(session_id)
        if isinstance(entry, Ownership) and entry.nonce == nonce:
            return entry.token
        if entry is None or token.newer_than(entry.token):
            # An entry that is away proves nothing: it may come back, and name us.
            raise DirectoryAmbiguousError(
                f"session {session_id}: the directory does not know it, or is older than "
                f"revision {token.revision}"
            )
        # Not there: either it never happened, or somebody wrote since. The compare tells.
        return await directory.transfer(session_id, token, node, nonce)
    except DirectoryAmbiguousError:
        raise
    except DirectoryError as error:
        # The first write is still open: that nothing was changed just now does not settle it.
        raise DirectoryAmbiguousError(str(error)) from error


def open_directory(url: str, credentials: CredentialsSource | None = None) -> Directory:
    """Open the directory that ``url`` names.

    ``sqlite:PATH`` is a file on this machine; ``grpc://NODE@HOST:PORT`` is the file of another
    node, which is pinned here under that name and was started with ``--share-directory``;
    ``etcd://HOST,HOST,HOST`` is a fleet's (:mod:`node.etcd_address` says what may follow).

    Args:
        url: Which directory.
        credentials: This node's own; needed for ``grpc:``, and for ``etcd:`` without files.

    Raises:
        UsageError: An address of another kind.
        CredentialsError: The other node is not pinned.
        DirectoryError: It cannot be opened.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite" and rest:
        from node.directory_sqlite import SqliteDirectory

        return SqliteDirectory(Path(rest))
    if scheme == "etcd":
        return _open_etcd(url, credentials)
    peer, at, address = rest.removeprefix("//").partition("@")
    if scheme != "grpc" or not rest.startswith("//") or not peer or not at:
        raise UsageError(f"directory {url!r}: expected {KINDS}")
    if credentials is None:
        raise UsageError(f"directory {url!r}: needs this node's credentials")
    from node.directory_remote import RemoteDirectory

    return RemoteDirectory(credentials, peer, Address.parse(address))


def _open_etcd(url: str, credentials: CredentialsSource | None) -> Directory:
    from node.etcd_address import EtcdAddress

    address = EtcdAddress.parse(url)
    try:
        from node.directory_etcd import EtcdDirectory
    except ModuleNotFoundError as error:
        if error.name != "etcd3aio":
            raise
        raise UsageError("etcd: not installed here; pip install 'kvpack[etcd]'") from error
    return EtcdDirectory(address, credentials)
