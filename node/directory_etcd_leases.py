"""Leases of nodes in an etcd: one lease each, on which one key hangs.

``node/NAME`` says which process holds the lease, and stays; ``lease/NAME`` hangs on the etcd's
lease and goes with it. So a lease that is over is told from one that never was, and a process that
comes back from one that was replaced. A takeover compares that ``lease/NAME`` is away.

A renewal keeps the etcd's lease alive and then looks whether it still holds the name. That narrows,
and does not close, a hole of etcds before 3.5.14: a leader that was replaced and does not know it
may go on to confirm renewals (etcd#15247).
"""

from __future__ import annotations

import math
from typing import Final

from node.config import LEASE_S
from node.directory import NodeLease
from node.directory_etcd_keys import Holder, Keys, after, decoded, encoded, end_of, key_values
from node.errors import DirectoryError, LeaseLiveError, LeaseLostError
from node.etcd import Compare, absent, get, put, unchanged
from node.etcd_cluster import EtcdCluster

#: Nodes that are read at once.
_PAGE: Final = 100

_TRIES: Final = 4


class EtcdLeases:
    """The leases below one prefix."""

    def __init__(self, cluster: EtcdCluster, keys: Keys) -> None:
        self._cluster = cluster
        self._keys = keys

    async def register(self, node: str, incarnation: bytes, ttl_s: float) -> None:
        """Begin a lease, whoever holds it."""
        await self._begin(node, Holder(incarnation, self._whole(ttl_s)), [])

    async def renew(self, node: str, incarnation: bytes, ttl_s: float) -> None:
        """Extend a lease that this process holds; also one that is over or was lost.

        Raises:
            LeaseLostError: Another process registered under that name since.
        """
        wanted = Holder(incarnation, self._whole(ttl_s))
        for _ in range(_TRIES):
            holder, written, lease = await self._read(node)
            # An empty one is nobody's: it stands for a node that had not registered.
            if holder is not None and holder.incarnation not in (incarnation, b""):
                raise LeaseLostError(f"node {node}: another process registered under this name")
            if holder == wanted and lease and await self._kept(node, lease, written):
                return
            key = self._keys.holder(node)
            same = absent(key) if holder is None else unchanged(key, written)
            if not (holder == wanted and lease) and await self._begin(node, wanted, [same]):
                return
        raise DirectoryError(f"node {node}: its lease is being changed all the time")

    async def expire(self, node: str, incarnation: bytes) -> None:
        """End a lease that this process holds."""
        holder, _, lease = await self._read(node)
        if holder is not None and holder.incarnation == incarnation and lease:
            await self._cluster.revoke(lease)

    async def lease(self, node: str) -> NodeLease | None:
        """A node's lease."""
        holder, _, lease = await self._read(node)
        if holder is None:
            return None
        # The key decides: a lease whose time is up counts until the etcd has removed it.
        left_s = max(0.1, await self._cluster.left_s(lease)) if lease else 0.0
        return NodeLease(node, holder.incarnation, min(left_s, float(holder.ttl_s)))

    async def require_over(self, session_id: str, node: str) -> Compare:
        """What a takeover from ``node`` has to compare.

        Raises:
            LeaseLiveError: Its lease runs; one that never registered is given one now.
        """
        holder, _, lease = await self._read(node)
        if holder is None:
            given = Holder(b"", math.ceil(LEASE_S))
            await self._begin(node, given, [absent(self._keys.holder(node))])
        if holder is None or lease:
            left_s = LEASE_S if holder is None else max(0.1, await self._cluster.left_s(lease))
            raise LeaseLiveError(
                f"session {session_id}: the lease of its owner, node {node}, "
                f"runs for another {left_s:.1f} s"
            )
        return absent(self._keys.lease(node))

    async def begin_again(self) -> None:
        """Let the lease of every node run anew, as long as it was granted."""
        begin, end = self._keys.nodes, end_of(self._keys.nodes)
        while True:
            reads = [get(begin, end, size=_PAGE)]
            page = key_values((await self._cluster.look(reads)).responses)[0]
            for one in page:
                key = one.key.decode()
                same = unchanged(key, one.mod_revision)
                holder = decoded(Holder, key, one.value)
                # One that registers or renews in between has a lease anew by that.
                await self._hang(key.removeprefix(self._keys.nodes), holder, [same])
            if len(page) < _PAGE:
                return
            begin = after(page[-1].key.decode())

    async def _read(self, node: str) -> tuple[Holder | None, int, int]:
        """Who holds the name, since which revision, and the etcd's lease; 0 where it is over."""
        key = self._keys.holder(node)
        reads = [get(key), get(self._keys.lease(node))]
        holders, leases = key_values((await self._cluster.look(reads)).responses)
        lease = int(leases[0].lease) if leases else 0
        if not holders:
            return None, 0, lease
        return decoded(Holder, key, holders[0].value), int(holders[0].mod_revision), lease

    async def _kept(self, node: str, lease: int, written: int) -> bool:
        """Whether the lease was extended, and is still the one of the same holder after that."""
        return await self._cluster.keep(lease) and (await self._read(node))[1:] == (written, lease)

    async def _begin(self, node: str, holder: Holder, compares: list[Compare]) -> bool:
        return await self._hang(self._quoted(node), holder, compares)

    async def _hang(self, quoted: str, holder: Holder, compares: list[Compare]) -> bool:
        """Grant a lease and hang the name on it, if all compares hold; what was before ends."""
        lease = await self._cluster.grant(holder.ttl_s)
        operations = [
            put(f"{self._keys.nodes}{quoted}", encoded(holder)),
            put(f"{self._keys.all}lease/{quoted}", encoded(holder), lease),
        ]
        answer = await self._cluster.swap(compares, operations)
        if not answer.succeeded:
            await self._cluster.revoke(lease)
            return False
        before = int(answer.responses[1].response_put.prev_kv.lease)
        if before:
            await self._cluster.revoke(before)
        return True

    def _quoted(self, node: str) -> str:
        return self._keys.holder(node).removeprefix(self._keys.nodes)

    def _whole(self, ttl_s: float) -> int:
        """An etcd counts in whole seconds: rounded up, it ends too late rather than too early."""
        return math.ceil(round(ttl_s, 3))
