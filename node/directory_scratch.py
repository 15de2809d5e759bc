"""Where ``kvnode directory check`` writes, and what is to be checked of each kind of directory.

In an etcd: keys below the directory's own, which are removed. In a file: another file beside it.
At another node: its directory itself, with session ids of our own, under our own name.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from node import enroll
from node.config import Address
from node.credentials import Credentials, CredentialsSource, Role, load_credentials, pin
from node.directory import Directory, Ownership, open_directory
from node.directory_sqlite import SqliteDirectory
from node.errors import DirectoryError, UsageError

Said: TypeAlias = tuple[str, dict[str, float]]
Check: TypeAlias = Callable[["Scratch"], Awaitable[Said]]

NAME: Final = "kvnode-check"


@dataclass(slots=True)
class Scratch:
    """Where to write, under which names.

    Attributes:
        directory: Where.
        node: A node that may own there.
        other: Another; the same one where we may write for one alone.
        free_names: Whether these names are nobody's.
        checks: What is to be checked of this kind alone, before the rest.
        run: What session ids begin with.
        made: Session ids that were given out.
    """

    directory: Directory
    node: str
    other: str
    free_names: bool
    checks: list[tuple[str, Check]]
    run: str = field(default_factory=lambda: f"check-{secrets.token_hex(6)}")
    made: list[str] = field(default_factory=list)

    def own_checks(self) -> list[tuple[str, Check]]:
        """What is to be checked of this kind alone."""
        return self.checks

    def session(self, name: str) -> str:
        """An id that no session has."""
        session_id = f"{self.run}-{name}"
        self.made.append(session_id)
        return session_id


@contextlib.asynccontextmanager
async def scratch_of(url: str, credentials: CredentialsSource | None) -> AsyncIterator[Scratch]:
    """A place beside the directory that ``url`` names; what was written there goes again.

    Raises:
        UsageError: No such directory, or no credentials for it.
        DirectoryError: It cannot be opened.
    """
    if url.startswith("etcd:"):
        from node.directory_check_etcd import beside_etcd

        opened = beside_etcd(url, credentials)
    elif url.startswith("sqlite:"):
        opened = _beside_file(Path(url.partition(":")[2]))
    else:
        opened = _inside_other(url, credentials)
    async with opened as scratch:
        yield scratch


@contextlib.asynccontextmanager
async def _beside_file(path: Path) -> AsyncIterator[Scratch]:
    async def file(_: Scratch) -> Said:
        if not path.exists():
            return "not there yet; the first node makes it", {}
        found = SqliteDirectory(path)
        try:
            state = await found.state()
        finally:
            await found.close()
        return (
            f"directory {state.directory_id.hex()}, generation {state.generation}, "
            f"revision {state.revision}",
            {"generation": state.generation, "revision": state.revision},
        )

    if not path.parent.is_dir():
        raise UsageError(f"directory {path}: no folder {path.parent}")
    # The same volume: a lock or a disk that does not hold there does not hold here either.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=path.parent) as folder:
        directory = SqliteDirectory(Path(folder) / "directory.sqlite")
        try:
            yield Scratch(directory, f"{NAME}-a", f"{NAME}-b", True, [("file", file)])
        finally:
            await directory.close()


@contextlib.asynccontextmanager
async def _inside_other(url: str, credentials: CredentialsSource | None) -> AsyncIterator[Scratch]:
    directory = open_directory(url, credentials)
    if credentials is None:
        raise UsageError(f"directory {url!r}: needs this node's credentials")
    own = credentials.current()

    async def reached(_: Scratch) -> Said:
        state = await directory.state()
        return (
            f"directory {state.directory_id.hex()}, generation {state.generation}, "
            f"revision {state.revision}",
            {"generation": state.generation, "revision": state.revision},
        )

    async def stranger(_: Scratch) -> Said:
        await _refused(url, own)
        return "a certificate of another authority is refused", {}

    scratch = Scratch(
        directory, own.name, own.name, False, [("directory", reached), ("stranger", stranger)]
    )
    try:
        yield scratch
    finally:
        with contextlib.suppress(DirectoryError):
            for session_id in scratch.made:
                record = await directory.owner(session_id)
                if isinstance(record, Ownership):
                    await directory.release(session_id, record.token)
        await directory.close()


async def _refused(url: str, own: Credentials) -> None:
    from node.directory_check import CheckFailed
    from node.directory_remote import RemoteDirectory

    peer, _, address = url.removeprefix("grpc://").partition("@")
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
        stranger = await asyncio.to_thread(stranger_in, Path(folder))
        pin(stranger, own.peer(peer, Role.NODE).certificate_pem, Role.NODE)
        directory = RemoteDirectory(load_credentials(stranger), peer, Address.parse(address))
        try:
            await directory.state()
        except DirectoryError:
            return
        finally:
            await directory.close()
    raise CheckFailed("a certificate of another authority was let in")


def stranger_in(folder: Path) -> Path:
    """Credentials of an authority that nobody knows."""
    enroll.enroll(folder / "authority", folder / NAME, NAME)
    return folder / NAME
