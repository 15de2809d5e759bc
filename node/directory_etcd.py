"""The ``etcd:`` directory: for a fleet, whose members may die one by one.

A token's revision is that of the etcd at the write that made the owner: it grows, no two writes
share one, and a renewal of a lease moves none. Every write is one transaction. It compares the
revision at which the session's entry was last written (the token) and that of the directory's
identity (the generation), so of all that start from one token one happens, and none after an
adoption. Each looks first, so it knows the owner and finds what it wrote itself, by its nonce; that
costs a read, which is cheaper than a wrong verdict about a lost reply.

Entries hang on no lease: an owner whose lease ended keeps its sessions until somebody takes them
over by name. Only the lease itself does (:mod:`node.directory_etcd_leases`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import Any, Final

from kvpack import limits
from node.credentials import CredentialsSource
from node.directory import (
    DIRECTORY_ID_BYTES,
    WATCH_S_MAX,
    DirectoryState,
    NodeLease,
    Ownership,
    OwnershipToken,
    Published,
    Record,
    Released,
    check_value,
    lease_ms,
    require_current,
)
from node.directory_etcd_keys import (
    FORMAT,
    Entry,
    Identity,
    Keys,
    Tombstone,
    Value,
    View,
    after,
    encoded,
    end_of,
    key_values,
    read_entry,
    read_identity,
    read_tombstone,
    read_value,
)
from node.directory_etcd_leases import EtcdLeases
from node.errors import (
    DirectoryError,
    DirectoryWentBackError,
    LeaseLiveError,
    SessionExistsError,
)
from node.etcd import Compare, Operation, absent, delete, get, put, unchanged
from node.etcd_address import EtcdAddress
from node.etcd_cluster import EtcdCluster
from node.parked import identity_of

#: A tombstone may go once the etcd is this many revisions past it (:mod:`node.directory_tables`).
TOMBSTONE_SPAN: Final = 1 << 17

#: Tombstones that a release looks at, to remove those. A transaction takes 128 operations.
SWEEP: Final = 40

#: Entries that are read at once.
PAGE: Final = 500

#: Between two looks of one that watches: a change is told at once, a silent member never.
LOOK_AGAIN_S: Final = 2.0
_TOLD_S: Final = 0.01

#: How often a write begins anew where it lost to something that did not decide it.
_TRIES: Final = 8


class EtcdDirectory:
    """A :class:`node.directory.Directory` in an etcd.

    Args:
        address: Which.
        credentials: This node's own, where the address names no files.

    Raises:
        UsageError: No certificates are known.
        CredentialsError: They cannot be used.
    """

    def __init__(self, address: EtcdAddress, credentials: CredentialsSource | None = None) -> None:
        self.cluster = EtcdCluster(address, credentials)
        self.keys = Keys(address.prefix)
        self._leases = EtcdLeases(self.cluster, self.keys)
        self._sweep_from = self.keys.released

    async def state(self) -> DirectoryState:
        # Also of an etcd that was restored: whoever adopts it has to know which one it is.
        identity, _, answer = await self._identity(())
        return DirectoryState(identity.id, identity.generation, answer.header.revision)

    async def owner(self, session_id: str) -> Record | None:
        return (await self._view(session_id)).record

    async def watch(self, session_id: str, seen: Record | None, timeout_s: float) -> Record | None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + min(timeout_s, WATCH_S_MAX)
        while True:
            view = await self._view(session_id)
            left_s = end_s - loop.time()
            if view.record != seen or left_s <= 0:
                return view.record
            # What it is told only wakes it. So neither a compacted revision, nor a member that
            # fell silent, nor an adoption (another key) can hide a change from it.
            await self.cluster.changed(
                self.keys.session(session_id), view.state.revision + 1, min(LOOK_AGAIN_S, left_s)
            )
            await asyncio.sleep(min(_TOLD_S, max(0.0, end_s - loop.time())))

    async def claim(self, session_id: str, node: str, nonce: bytes) -> OwnershipToken:
        view = await self._view(session_id)
        for _ in range(_TRIES):
            if isinstance(view.record, Ownership):
                if (view.record.node, view.record.nonce) == (node, nonce):
                    return view.record.token
                raise SessionExistsError(f"session {session_id}: somebody owns it already")
            operations = [
                *self._enter(session_id, node, nonce),
                delete(self.keys.tombstone(session_id)),
                delete(self.keys.value(session_id)),
            ]
            free = absent(self.keys.session(session_id))
            done, view = await self._swap(session_id, view, [free], operations)
            if done:
                return _token(view)
        raise _restless(session_id)

    async def transfer(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        return await self._transfer(session_id, token, node, nonce, by_force=False)

    async def takeover(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes
    ) -> OwnershipToken:
        return await self._transfer(session_id, token, node, nonce, by_force=True)

    async def release(self, session_id: str, token: OwnershipToken) -> None:
        view = await self._view(session_id)
        for _ in range(_TRIES):
            if isinstance(view.record, Released) and view.record.token == token:
                return
            entry = require_current(view.record, session_id, token)
            tombstone = Tombstone(entry.node, token.generation, token.revision)
            operations = [
                delete(self.keys.session(session_id)),
                delete(self.keys.owned(entry.node, session_id)),
                delete(self.keys.value(session_id)),
                put(self.keys.tombstone(session_id), encoded(tombstone)),
            ]
            done, view = await self._swap(session_id, view, [self._current(entry)], operations)
            if done:
                # The release is done; what is not swept now is swept by a later one.
                with contextlib.suppress(DirectoryError):
                    await self._sweep(view.state.revision)
                return
        raise _restless(session_id)

    async def put(self, session_id: str, token: OwnershipToken, value: bytes) -> None:
        kept = encoded(Value(token.generation, token.revision, check_value(value)))
        view = await self._view(session_id)
        for _ in range(_TRIES):
            entry = require_current(view.record, session_id, token)
            operations = [put(self.keys.value(session_id), kept)]
            done, view = await self._swap(session_id, view, [self._current(entry)], operations)
            if done:
                return
        raise _restless(session_id)

    async def published(self, session_id: str) -> Published | None:
        identity, _, found = await self._look([get(self.keys.value(session_id))])
        return read_value(identity, found[0][0]) if found[0] else None

    async def owned_by(self, node: str) -> list[Ownership]:
        first, end = self.keys.owned(node), end_of(self.keys.owned(node))
        entries: list[Ownership] = []
        begin = first
        while True:
            identity, _, (page,) = await self._look([get(begin, end, size=PAGE)])
            for one in page:
                entries.append(read_entry(identity, one.key.decode()[len(first) :], one))
            if len(page) < PAGE:
                return entries
            begin = after(page[-1].key.decode())

    async def register(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        lease_ms(ttl_s)
        await self._look(())
        await self._leases.register(node, incarnation, ttl_s)
        return (await self._look(()))[1]

    async def renew(self, node: str, incarnation: bytes, ttl_s: float) -> DirectoryState:
        lease_ms(ttl_s)
        await self._leases.renew(node, incarnation, ttl_s)
        return (await self._look(()))[1]

    async def expire(self, node: str, incarnation: bytes) -> None:
        await self._leases.expire(node, incarnation)

    async def lease(self, node: str) -> NodeLease | None:
        return await self._leases.lease(node)

    async def adopt(self, above: int = 0) -> DirectoryState:
        """Make every token that was given out so far stale: after a restore, a copy, a new etcd.

        Args:
            above: Raise the generation over this one, too: the highest that any node has seen.

        Raises:
            LimitError: ``above`` is outside the range of a generation.
        """
        limits.check_range("directory.generation", above, 0, (1 << 62))
        await self._leases.begin_again()
        for _ in range(_TRIES):
            identity, written, answer = await self._identity(())
            risen = Identity(
                FORMAT,
                identity.id,
                max(identity.generation, above) + 1,
                answer.header.cluster_id,
            )
            same = unchanged(self.keys.directory, written)
            answer = await self.cluster.swap([same], [put(self.keys.directory, encoded(risen))])
            if answer.succeeded:
                return DirectoryState(risen.id, risen.generation, answer.header.revision)
        raise DirectoryError("directory: adopted by somebody else at the same time")

    async def close(self) -> None:
        await self.cluster.close()

    async def _transfer(
        self, session_id: str, token: OwnershipToken, node: str, nonce: bytes, *, by_force: bool
    ) -> OwnershipToken:
        view = await self._view(session_id)
        for _ in range(_TRIES):
            record = view.record
            if isinstance(record, Ownership) and (record.node, record.nonce) == (node, nonce):
                return record.token
            if by_force:
                _require_no_store(record)
            entry = require_current(record, session_id, token)
            compares = [self._current(entry)]
            if by_force and entry.node != node:
                compares.append(await self._leases.require_over(session_id, entry.node))
            operations = self._enter(session_id, node, nonce)
            if entry.node != node:
                operations.append(delete(self.keys.owned(entry.node, session_id)))
            done, view = await self._swap(session_id, view, compares, operations)
            if done:
                return _token(view)
        raise _restless(session_id)

    def _enter(self, session_id: str, node: str, nonce: bytes) -> list[Operation]:
        entry = encoded(Entry(node, nonce))
        return [
            put(self.keys.session(session_id), entry),
            put(self.keys.owned(node, session_id), entry),
        ]

    def _current(self, entry: Ownership) -> Compare:
        return unchanged(self.keys.session(entry.session_id), entry.token.revision)

    async def _swap(
        self,
        session_id: str,
        view: View,
        compares: Sequence[Compare],
        operations: Sequence[Operation],
    ) -> tuple[bool, View]:
        """Whether it was done, and what stands there now."""
        same = unchanged(self.keys.directory, view.written)
        answer = await self.cluster.swap([same, *compares], operations, self._reads(session_id))
        if not answer.succeeded:
            return False, await self._seen(session_id, answer)
        state = view.state
        now = DirectoryState(state.directory_id, state.generation, answer.header.revision)
        return True, View(now, view.written, None)

    def _reads(self, session_id: str) -> list[Operation]:
        keys = self.keys
        return [get(keys.directory), get(keys.session(session_id)), get(keys.tombstone(session_id))]

    async def _view(self, session_id: str) -> View:
        return await self._seen(session_id, await self.cluster.look(self._reads(session_id)))

    async def _seen(self, session_id: str, answer: Any) -> View:  # noqa: ANN401 - the client's
        found, entries, tombstones = key_values(answer.responses)
        known = read_identity(self.keys, found)
        if known is None:
            await self._make_identity()
            return await self._view(session_id)
        identity, written = known
        _require_same(identity, answer)
        record: Record | None = None
        if entries:
            record = read_entry(identity, session_id, entries[0])
        elif tombstones:
            record = read_tombstone(identity, session_id, tombstones[0])
        state = DirectoryState(identity.id, identity.generation, answer.header.revision)
        return View(state, written, record)

    async def _look(
        self, operations: Sequence[Operation]
    ) -> tuple[Identity, DirectoryState, list[list[Any]]]:
        identity, _, answer = await self._identity(operations)
        _require_same(identity, answer)
        state = DirectoryState(identity.id, identity.generation, answer.header.revision)
        return identity, state, key_values(answer.responses)[1:]

    async def _identity(self, operations: Sequence[Operation]) -> tuple[Identity, int, Any]:
        while True:
            answer = await self.cluster.look([get(self.keys.directory), *operations])
            known = read_identity(self.keys, key_values(answer.responses)[0])
            if known is not None:
                return *known, answer
            await self._make_identity()

    async def _make_identity(self) -> None:
        cluster = (await self.cluster.look([get(self.keys.directory)])).header.cluster_id
        made = Identity(FORMAT, secrets.token_bytes(DIRECTORY_ID_BYTES), 1, cluster)
        operations = [put(self.keys.directory, encoded(made))]
        await self.cluster.swap([absent(self.keys.directory)], operations)

    async def _sweep(self, revision: int) -> None:
        """Remove some old tombstones. Each release looks at the next few, round and round."""
        end = end_of(self.keys.released)
        reads = [get(self._sweep_from, end, size=SWEEP, keys_only=True)]
        page = key_values((await self.cluster.look(reads)).responses)[0]
        full = len(page) == SWEEP
        self._sweep_from = after(page[-1].key.decode()) if full else self.keys.released
        old = [one for one in page if one.mod_revision <= revision - TOMBSTONE_SPAN]
        if old:
            # One that was written anew in between stops all of them; the next round finds them.
            compares = [unchanged(one.key.decode(), one.mod_revision) for one in old]
            await self.cluster.swap(compares, [delete(one.key.decode()) for one in old])


def _token(view: View) -> OwnershipToken:
    state = view.state
    return OwnershipToken(state.directory_id, state.generation, state.revision)


def _require_no_store(record: Record | None) -> None:
    if isinstance(record, Ownership) and identity_of(record.node) is not None:
        # No lease ever ends there, and whoever took it over would have nothing to serve.
        raise LeaseLiveError(
            f"session {record.session_id}: lies in a store; kvnode session restore brings it back"
        )


def _require_same(identity: Identity, answer: Any) -> None:  # noqa: ANN401 - the client's
    """An etcd that was made from a backup has another id: it gives revisions out a second time."""
    if identity.cluster != answer.header.cluster_id:
        raise DirectoryWentBackError(
            f"directory: lies in etcd {answer.header.cluster_id:x}, but was made or adopted in "
            f"{identity.cluster:x}: a restored backup, or a copy; adopt it (kvnode directory adopt)"
        )


def _restless(session_id: str) -> DirectoryError:
    return DirectoryError(f"session {session_id}: the directory is being changed all the time")
