"""The members of an etcd, one of which is asked; another one once that does not answer.

A look is asked again elsewhere, within one bound. A write is asked once: where its answer is lost,
it is :class:`DirectoryAmbiguousError`, and whoever wrote settles it by looking (through another
member). Certificates that were renewed are used from the next call on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import grpc

from node.credentials import CredentialsSource
from node.errors import CredentialsError, DirectoryAmbiguousError, DirectoryError, UsageError
from node.etcd import Answer, Compare, Etcd, EtcdLost, EtcdRefused, Operation
from node.etcd_address import EtcdAddress, TlsFiles

_T = TypeVar("_T")

#: All tries of a look together, and one of them: a member that hangs is not waited for longer.
LOOK_S: Final = 5.0
TRY_S: Final = 2.0

#: Between two tries.
PAUSE_S: Final = 0.1

#: A write waits for the quorum, an election included.
WRITE_S: Final = 5.0

#: Certificates in files are looked at again when they were last seen this long ago.
FILES_AGE_S: Final = 1.0

_PEM_BYTES_MAX: Final = 1 << 20

#: What is still asked over a channel whose certificates were replaced is given this long.
_CLOSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM of whom to believe, and of what to show; empty: nothing."""

    ca: bytes
    cert: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Certificates(…)"


class CertificateSource:
    """The certificates of the moment: a node's own, or those of files.

    Raises:
        UsageError: Neither is there.
        CredentialsError: A file cannot be read, or its key is open to everybody.
    """

    def __init__(self, address: EtcdAddress, credentials: CredentialsSource | None) -> None:
        if not address.plain and address.files is None and credentials is None:
            raise UsageError(
                "etcd: needs this node's credentials, or ca=, cert= and key=; on loopback, tls=off"
            )
        self._address = address
        self._credentials = credentials
        self._read: tuple[float, Certificates] | None = None
        self.current()

    def current(self) -> Certificates | None:
        """What to use now; None: plain text."""
        if self._address.plain:
            return None
        if self._address.files is not None:
            return self._of_files(self._address.files)
        if self._credentials is None:
            raise RuntimeError("no credentials")
        own = self._credentials.current(max_age_s=FILES_AGE_S)
        return Certificates(own.authority_pem, own.certificate_pem, own.key_pem)

    def _of_files(self, files: TlsFiles) -> Certificates:
        now_s = time.monotonic()
        if self._read is not None and now_s - self._read[0] < FILES_AGE_S:
            return self._read[1]
        try:
            found = Certificates(*(_pem(path) for path in (files.ca, files.cert, files.key)))
            if files.key.stat().st_mode & 0o004:
                raise CredentialsError(f"{files.key}: everybody may read it")
        except OSError as error:
            if self._read is None:
                raise CredentialsError(f"{error.filename}: {error.strerror}") from error
            # While files are replaced one may be away: the last good ones stay in use.
            found = self._read[1]
        self._read = now_s, found
        return found


def _pem(path: object) -> bytes:
    with open(str(path), "rb") as file:  # noqa: PTH123 - links are how Kubernetes mounts secrets
        content = file.read(_PEM_BYTES_MAX + 1)
    if len(content) > _PEM_BYTES_MAX or b"-----BEGIN" not in content:
        raise CredentialsError(f"{path}: expected PEM of at most {_PEM_BYTES_MAX} bytes")
    return content


class EtcdCluster:
    """The members under one address.

    Args:
        address: Where they are.
        credentials: This node's own, where the address names no files.

    Raises:
        UsageError: No certificates are known.
        CredentialsError: They cannot be used.
    """

    def __init__(self, address: EtcdAddress, credentials: CredentialsSource | None = None) -> None:
        self.address = address
        self._source = CertificateSource(address, credentials)
        self._shown = self._source.current()
        self._open: dict[int, Etcd] = {}
        self._asked = 0
        self._closing: set[asyncio.Task[None]] = set()

    async def look(self, operations: Sequence[Operation]) -> Answer:
        """What stands there now, read in one step, of the quorum.

        Raises:
            DirectoryError: No member answers.
        """
        return await self._looked(lambda member, bound_s: member.txn((), operations, (), bound_s))

    async def left_s(self, lease: int) -> int:
        """How long a lease still runs, in whole seconds; negative where it is over.

        Raises:
            DirectoryError: No member answers.
        """
        return int((await self._looked(lambda member, bound_s: member.left(lease, bound_s))).TTL)

    async def swap(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> Answer:
        """Compare and write, in one step, asked for once.

        Raises:
            DirectoryAmbiguousError: It may have been done.
            DirectoryError: It was refused: it was not done.
        """
        with self._writing():
            return await self._member().txn(compares, then, otherwise, WRITE_S)

    async def grant(self, ttl_s: int) -> int:
        """A new lease of at least ``ttl_s`` seconds; gives its number."""
        with self._writing():
            return int((await self._member().grant(ttl_s, WRITE_S)).ID)

    async def keep(self, lease: int) -> bool:
        """Let a lease run from now for its whole length; False where it is over."""
        with self._writing():
            return await self._member().keep(lease, WRITE_S)

    async def revoke(self, lease: int) -> None:
        """End a lease, as far as that can be done: it ends by itself, too."""
        with contextlib.suppress(DirectoryError), self._writing():
            await self._member().revoke(lease, WRITE_S)

    async def changed(self, key: str, revision: int, timeout_s: float) -> None:
        """Wait for a change of ``key`` from ``revision`` on, at most for ``timeout_s``."""
        await self._member().changed(key, revision, timeout_s)

    def members(self) -> list[Etcd]:
        """Every member by itself, to look at them one by one."""
        return [self._member(number) for number in range(len(self.address.members))]

    def opened(self, number: int, shown: Certificates | None) -> Etcd:
        """A connection of its own to one member; whoever asks for it closes it."""
        tls = None
        if shown is not None:
            tls = grpc.ssl_channel_credentials(shown.ca, shown.key or None, shown.cert or None)
        return Etcd(str(self.address.members[number]), tls, self.address.server_name)

    def certificates(self) -> Certificates:
        """What is shown and believed now.

        Raises:
            UsageError: Nothing is: plain text.
        """
        found = self._source.current()
        if found is None:
            raise UsageError("etcd: tls=off shows no certificates")
        return found

    async def close(self) -> None:
        """Hang up."""
        for task in self._closing:
            task.cancel()
        for member in self._open.values():
            await member.close()
        self._open.clear()

    async def _looked(self, ask: Callable[[Etcd, float], Awaitable[_T]]) -> _T:
        end_s = time.monotonic() + LOOK_S
        while True:
            left_s = max(end_s - time.monotonic(), 0.1)
            try:
                return await ask(self._member(), min(TRY_S, left_s))
            except EtcdRefused as error:
                raise DirectoryError(f"directory: {error}") from None
            except EtcdLost as error:
                self._ask_another()
                if time.monotonic() + PAUSE_S >= end_s:
                    raise DirectoryError(f"directory: {error}") from None
                await asyncio.sleep(PAUSE_S)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except EtcdRefused as error:
            raise DirectoryError(f"directory: {error}") from None
        except EtcdLost as error:
            self._ask_another()
            raise DirectoryAmbiguousError(f"directory: {error}") from None

    def _member(self, number: int | None = None) -> Etcd:
        present = self._source.current()
        if present != self._shown:
            # A channel keeps the certificates that it was opened with.
            for member in self._open.values():
                self._close_later(member)
            self._open.clear()
            self._shown = present
        number = self._asked if number is None else number
        if number not in self._open:
            self._open[number] = self.opened(number, present)
        return self._open[number]

    def _ask_another(self) -> None:
        self._asked = (self._asked + 1) % len(self.address.members)

    def _close_later(self, member: Etcd) -> None:
        async def close() -> None:
            await asyncio.sleep(_CLOSE_S)
            await member.close()

        task = asyncio.ensure_future(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
