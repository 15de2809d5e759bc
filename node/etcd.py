"""One member of an etcd: the only file that touches ``etcd3aio``.

Its services are used on a channel of ours. The client's own takes addresses but no names, and after
an outage it waits up to two minutes before it connects again. Nothing is retried here: a retried
transaction that had landed would look like one that lost (``rpc_max_attempts``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import grpc.aio
from etcd3aio import EtcdError, EtcdPermissionDeniedError, EtcdUnauthenticatedError
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService
from etcd3aio.maintenance import MaintenanceService
from etcd3aio.watch import WatchService

_T = TypeVar("_T")

#: Messages of the client's protocol; it has no public names for them.
Compare: TypeAlias = Any
Operation: TypeAlias = Any
Answer: TypeAlias = Any

_Code = grpc.StatusCode

#: Codes by which a member says no: whatever was asked for, it did not do it.
_REFUSED: Final = frozenset(
    {
        *(_Code.INVALID_ARGUMENT, _Code.NOT_FOUND, _Code.OUT_OF_RANGE, _Code.UNIMPLEMENTED),
        *(_Code.RESOURCE_EXHAUSTED, _Code.FAILED_PRECONDITION, _Code.PERMISSION_DENIED),
    }
)

#: An answer holds at most a page of entries; an etcd refuses requests over 1.5 MiB.
_MESSAGE_BYTES_MAX: Final = 8 << 20

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    # An etcd takes pings every 5 s, also without calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # gRPC's own bound is two minutes: an etcd that is back would be away for so long.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class EtcdRefused(Exception):
    """The member said no: nothing was changed."""


class EtcdLost(Exception):
    """No answer, or one that says nothing about what was done."""


def absent(key: str) -> Compare:
    """Holds while there is no such key."""
    return KVService.txn_compare_version(key, 0)


def unchanged(key: str, revision: int) -> Compare:
    """Holds while the key was last written at ``revision``."""
    compare = KVService.txn_compare_version(key, 0)
    compare.target, compare.mod_revision = compare.MOD, revision
    return compare


def put(key: str, value: bytes, lease: int = 0) -> Operation:
    """Write a key; with ``lease`` it goes when that lease ends. The answer holds what was there."""
    return KVService.txn_op_put(key, value, lease=lease, prev_kv=True)


def delete(key: str, end: str | None = None) -> Operation:
    """Remove a key, or all from it up to ``end``."""
    return KVService.txn_op_delete(key, range_end=end)


def get(key: str, end: str | None = None, *, size: int = 0, keys_only: bool = False) -> Operation:
    """Read a key, or up to ``size`` from it up to ``end``, by key."""
    operation = KVService.txn_op_get(key, range_end=end)
    operation.request_range.limit = size
    operation.request_range.keys_only = keys_only
    return operation


class Etcd:
    """One member. Every call has a bound on its time.

    Args:
        target: ``HOST:PORT``.
        tls: Certificates; None: plain text.
        server_name: What its certificate has to name instead of the host; may be empty.
    """

    def __init__(self, target: str, tls: grpc.ChannelCredentials | None, server_name: str) -> None:
        options: list[tuple[str, Any]] = [*_OPTIONS]
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            if server_name:
                options.append(("grpc.ssl_target_name_override", server_name))
            self._channel = grpc.aio.secure_channel(target, tls, options=options)
        self._kv = KVService(self._channel, max_attempts=1)
        self._lease = LeaseService(self._channel, max_attempts=1)
        self._watch = WatchService(self._channel, max_attempts=1)
        self._maintenance = MaintenanceService(self._channel, max_attempts=1)

    async def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
        timeout_s: float,
    ) -> Answer:
        """``then`` where all ``compares`` hold, else ``otherwise``; in one step."""
        return await _asked(self._kv.txn(compares, then, otherwise, timeout=timeout_s))

    async def grant(self, ttl_s: int, timeout_s: float) -> Answer:
        """A new lease; the member may make it longer."""
        return await _asked(self._lease.grant(ttl_s, timeout=timeout_s))

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """End a lease; the keys under it go."""
        await _asked(self._lease.revoke(lease, timeout=timeout_s))

    async def left(self, lease: int, timeout_s: float) -> Answer:
        """How long a lease still runs (``TTL``), in whole seconds."""
        return await _asked(self._lease.time_to_live(lease, timeout=timeout_s))

    async def keep(self, lease: int, timeout_s: float) -> bool:
        """Let a lease run from now for its whole length; False where it is over."""

        async def once() -> bool:
            stream = self._lease.keep_alive(lease)
            try:
                async with asyncio.timeout(timeout_s):
                    async for answer in stream:
                        return bool(answer.TTL > 0)
            finally:
                stream.cancel()
            raise EtcdLost("the member hung up")

        return await _asked(once())

    async def changed(self, key: str, revision: int, timeout_s: float) -> None:
        """Wait until the key changes from ``revision`` on, or there is any reason to look again.

        What is compacted away cannot be told any more: that, too, is a reason.
        """

        async def wait() -> None:
            # An async generator, whatever it is declared to be: closed, it hangs up.
            answers: Any = self._watch.watch(key, start_revision=revision)
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    if answer.events or answer.compact_revision or answer.canceled:
                        return

        # Whatever ends it, whoever waits looks for himself.
        with contextlib.suppress(TimeoutError, EtcdError, grpc.aio.AioRpcError):
            async with asyncio.timeout(timeout_s):
                await wait()

    async def status(self, timeout_s: float) -> Answer:
        """What the member says of itself: version, leader, revision."""
        return await _asked(self._maintenance.status(timeout=timeout_s))

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()


async def _asked(call: Awaitable[_T]) -> _T:
    try:
        return await call
    except (EtcdPermissionDeniedError, EtcdUnauthenticatedError) as error:
        raise EtcdRefused(str(error)) from error
    except EtcdError as error:
        raise EtcdLost(str(error)) from error
    except TimeoutError as error:
        raise EtcdLost("no answer in time") from error
    except grpc.aio.AioRpcError as error:
        kind = EtcdRefused if error.code() in _REFUSED else EtcdLost
        raise kind(f"{error.code().name}: {error.details()}") from error
