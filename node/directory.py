"""Who owns which session. The one place where ownership changes hands.

A directory keeps one entry for each session: the owning node and the revision of the write that
made it owner. Every change compares the whole token, so of two that start from one token exactly
one happens. Its compare-and-swap is the commit point of every move.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvpack import limits
from node.errors import DirectoryAmbiguousError, DirectoryError, UsageError

DIRECTORY_ID_BYTES: Final = 16
NONCE_BYTES: Final = 16


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
        limits.check_range("token.generation", self.generation, 1, (1 << 63) - 1)
        limits.check_range("token.revision", self.revision, 1, (1 << 63) - 1)

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


class Directory(Protocol):
    """What a node needs of a directory. Every method may raise :class:`DirectoryError`.

    A write whose reply was lost raises :class:`DirectoryAmbiguousError`; :func:`settle` then says
    what became of it, by its nonce.
    """

    async def owner(self, session_id: str) -> Ownership | None:
        """The session's entry, or None where nobody owns it."""
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

    async def release(self, session_id: str, token: OwnershipToken) -> None:
        """Remove the session's entry if ``token`` is still the current one.

        Raises:
            StaleTokenError: It is not.
        """
        ...

    async def owned_by(self, node: str) -> list[Ownership]:
        """All entries of ``node``, by session id."""
        ...

    async def close(self) -> None:
        """Give up files and connections."""
        ...


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

    Raises:
        StaleTokenError: It did not happen and cannot any more.
        DirectoryAmbiguousError: Still nobody knows.
    """
    try:
        entry = await directory.owner(session_id)
        if entry is not None and entry.nonce == nonce:
            return entry.token
        # Not there: either it never happened, or somebody wrote since. The compare tells.
        return await directory.transfer(session_id, token, node, nonce)
    except DirectoryAmbiguousError:
        raise
    except DirectoryError as error:
        # The first write is still open: that nothing was changed just now does not settle it.
        raise DirectoryAmbiguousError(str(error)) from error


def open_directory(url: str) -> Directory:
    """Open the directory that ``url`` names: ``sqlite:PATH``.

    Raises:
        UsageError: An address of another kind.
        DirectoryError: It cannot be opened.
    """
    scheme, colon, rest = url.partition(":")
    if scheme != "sqlite" or not colon or not rest:
        raise UsageError(f"directory {url!r}: expected sqlite:PATH")
    from node.directory_sqlite import SqliteDirectory

    return SqliteDirectory(Path(rest))
