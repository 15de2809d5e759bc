"""A node's part in its directory, for as long as it runs: opened, compared, leased, shared."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from node.clock import BootClock
from node.config import ServeConfig
from node.directory import Directory, open_directory
from node.directory_seen import Seen, SeenDirectory
from node.directory_sqlite import SqliteDirectory
from node.errors import UsageError
from node.lease import NodeLease

if TYPE_CHECKING:
    from node.credentials import CredentialsSource

log = logging.getLogger(__name__)

#: Inside a data folder: the newest seen of each directory.
SEEN: Final = "directory-seen.sqlite"

#: An election takes one to three seconds, and renewals, three in a lease, wait for it.
ETCD_LEASE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """What a node uses of its directory.

    Attributes:
        directory: Every answer of it is compared with the newest seen.
        lease: Runs and is renewed.
        shared: The file to serve to other nodes, if it is to be served.
    """

    directory: Directory
    lease: NodeLease
    shared: SqliteDirectory | None


@contextlib.asynccontextmanager
async def member(
    config: ServeConfig, credentials: CredentialsSource | None, name: str
) -> AsyncIterator[Member]:
    """Open the directory, register, and renew the lease until the block ends.

    Raises:
        UsageError: An address of another kind, or one that cannot be shared.
        CredentialsError: The node that serves the directory is not pinned.
        DirectoryError: It cannot be reached, or it is older than what was seen of it.
    """
    async with contextlib.AsyncExitStack() as stack:
        opened = open_directory(config.directory_url, credentials)
        stack.push_async_callback(opened.close)
        shared = opened if isinstance(opened, SqliteDirectory) else None
        if config.share_directory and shared is None:
            raise UsageError(f"directory {config.directory_url!r}: only sqlite:PATH can be shared")
        seen = Seen(config.data_dir / SEEN)
        stack.push_async_callback(seen.close)
        directory = SeenDirectory(opened, seen)
        if config.directory_url.startswith("etcd:") and config.lease_s < ETCD_LEASE_S:
            log.warning(
                "a lease of %.1f s may end while the etcd elects a leader; %.0f s outlast it",
                config.lease_s, ETCD_LEASE_S,
            )  # fmt: skip
        lease = NodeLease(directory, name, BootClock(), config.lease_s)
        await lease.start()
        stack.push_async_callback(lease.close)
        renewing = asyncio.create_task(lease.run())
        stack.push_async_callback(_cancel, renewing)
        yield Member(directory, lease, shared if config.share_directory else None)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
