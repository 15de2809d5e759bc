"""``kvnode directory check``: does a directory keep what nodes rely on, tried on the real thing.

What is written is written beside the directory (:mod:`node.directory_scratch`), so no session and
no node is touched. A check that fails says what it found; those after it are tried all the same.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpack.errors import KvpackError
from node.directory import NONCE_BYTES, Directory, Ownership, OwnershipToken, Released
from node.directory_scratch import Check, Said, Scratch
from node.errors import LeaseLiveError, SessionExistsError, StaleTokenError

#: Those who want one session at the same moment.
CONTENDERS: Final = 50

#: Writes that are timed.
TIMED: Final = 20

#: The lease that is tried; an etcd may make it longer, and each says how long it was.
TTL_S: Final = 2.0

#: A lease may end this much too late, and a change may be told this much later.
LATE_S: Final = 5.0
TOLD_S: Final = 1.0

#: One check may take this long.
CHECK_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, whether it held, what was found in words and in numbers."""

    check: str
    ok: bool
    said: str
    numbers: dict[str, float] = field(default_factory=dict)


class CheckFailed(Exception):
    """What does not hold."""


async def findings(scratch: Scratch) -> AsyncIterator[Finding]:
    """Every check, one by one, as soon as it is known."""
    checks = [*scratch.own_checks(), *_COMMON]
    for name, check in checks:
        try:
            async with asyncio.timeout(CHECK_S):
                said, numbers = await check(scratch)
            yield Finding(name, True, said, numbers)
        except CheckFailed as failed:
            yield Finding(name, False, str(failed))
        except TimeoutError:
            yield Finding(name, False, f"no end in {CHECK_S:.0f} s")
        except KvpackError as error:
            yield Finding(name, False, f"{error.reason}: {error}")


async def _claim(scratch: Scratch) -> Said:
    """Claims and transfers, one after another, timed."""
    claims, transfers = [], []
    for number in range(TIMED):
        name = scratch.session(f"timed-{number}")
        begun_s = time.perf_counter()
        token = await scratch.directory.claim(name, scratch.node, _nonce())
        claims.append(time.perf_counter() - begun_s)
        begun_s = time.perf_counter()
        newer = await scratch.directory.transfer(name, token, scratch.other, _nonce())
        transfers.append(time.perf_counter() - begun_s)
        _require(newer.newer_than(token), "a transfer's token is not newer than the claim's")
        await scratch.directory.release(name, newer)
    claim_ms, transfer_ms = (1000 * statistics.median(one) for one in (claims, transfers))
    return (
        f"claim {claim_ms:.1f} ms, transfer {transfer_ms:.1f} ms, the median of {TIMED}",
        {"claim_p50_ms": round(claim_ms, 3), "transfer_p50_ms": round(transfer_ms, 3)},
    )


async def _contenders(scratch: Scratch) -> Said:
    """Many who start from one token, and from none."""
    name = scratch.session("contended")
    claims = [scratch.directory.claim(name, scratch.node, _nonce()) for _ in range(CONTENDERS)]
    won = await _winners(claims, SessionExistsError)
    _require(len(won) == 1, f"{len(won)} of {CONTENDERS} claims of one session won")
    moves = [
        scratch.directory.transfer(name, won[0], scratch.other, _nonce()) for _ in range(CONTENDERS)
    ]
    taken = await _winners(moves, StaleTokenError)
    _require(len(taken) == 1, f"{len(taken)} of {CONTENDERS} transfers from one token won")
    record = await scratch.directory.owner(name)
    found = record.token if isinstance(record, Ownership) else None
    _require(found == taken[0], "the winner of the transfers is not the owner")
    return f"1 of {CONTENDERS} claims and 1 of {CONTENDERS} transfers won", {
        "contenders": CONTENDERS,
        "winners": 1,
    }


async def _winners(
    writes: Sequence[Awaitable[OwnershipToken]], lost: type[KvpackError]
) -> list[OwnershipToken]:
    done = await asyncio.gather(*writes, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException) and not isinstance(one, lost):
            raise one
    return [one for one in done if isinstance(one, OwnershipToken)]


async def _fencing(scratch: Scratch) -> Said:
    """What an owner of before may still do: nothing."""
    name, directory = scratch.session("fenced"), scratch.directory
    old = await directory.claim(name, scratch.node, _nonce())
    new = await directory.transfer(name, old, scratch.other, _nonce())
    await directory.put(name, new, b"new")
    stale: list[Callable[[], Awaitable[object]]] = [
        lambda: directory.put(name, old, b"old"),
        lambda: directory.transfer(name, old, scratch.node, _nonce()),
        lambda: directory.release(name, old),
    ]
    for write in stale:
        try:
            await write()
        except StaleTokenError:
            continue
        raise CheckFailed("a write under an old token was accepted")
    published = await directory.published(name)
    _require(published is not None and published.value == b"new", "the value is not the owner's")
    return f"{len(stale)} of {len(stale)} writes under an old token refused", {
        "refused": len(stale)
    }


async def _repeat(scratch: Scratch) -> Said:
    """A write whose reply was lost is sent again: done once. A release leaves a tombstone."""
    name, directory = scratch.session("repeated"), scratch.directory
    nonce = _nonce()
    token = await directory.claim(name, scratch.node, nonce)
    _require(await directory.claim(name, scratch.node, nonce) == token, "a claim was done twice")
    nonce = _nonce()
    newer = await directory.transfer(name, token, scratch.other, nonce)
    again = await directory.transfer(name, token, scratch.other, nonce)
    _require(again == newer, "a transfer was done twice")
    await directory.release(name, newer)
    await directory.release(name, newer)
    _require(isinstance(await directory.owner(name), Released), "a release left no tombstone")
    return "claim, transfer and release sent twice were done once", {}


async def _watch(scratch: Scratch) -> Said:
    """How soon a change is told."""
    name, directory = scratch.session("watched"), scratch.directory
    token = await directory.claim(name, scratch.node, _nonce())
    seen = await directory.owner(name)
    watching = asyncio.create_task(directory.watch(name, seen, 10.0))
    await asyncio.sleep(0.3)
    _require(not watching.done(), "a change was told that nobody made")
    newer = await directory.transfer(name, token, scratch.other, _nonce())
    begun_s = time.perf_counter()
    found = await watching
    told_s = time.perf_counter() - begun_s
    _require(isinstance(found, Ownership) and found.token == newer, "something else was told")
    _require(told_s <= TOLD_S, f"told after {told_s:.1f} s, expected at most {TOLD_S:.0f} s")
    return f"told {1000 * told_s:.0f} ms after the change", {"told_ms": round(1000 * told_s, 1)}


async def _lease(scratch: Scratch) -> Said:
    """A lease holds while it is renewed, ends when it is not, and not too early."""
    node, directory = scratch.node, scratch.directory
    running = await directory.lease(node)
    if not scratch.free_names and running is not None and running.left_s > 0:
        return f"not tried: node {node} runs under it, {running.left_s:.1f} s left", {}
    process = _nonce()
    await directory.register(node, process, TTL_S)
    for _ in range(2):
        await asyncio.sleep(TTL_S * 0.6)
        sent_s = time.monotonic()
        await directory.renew(node, process, TTL_S)
    name = scratch.session("leased")
    token = await directory.claim(name, node, _nonce())
    if scratch.free_names:
        try:
            await directory.takeover(name, token, scratch.other, _nonce())
        except LeaseLiveError:
            pass
        else:
            raise CheckFailed("a session was taken over while its owner's lease ran")
    left_s = await _outlasted(directory, node, sent_s)
    _require(left_s >= TTL_S, f"a lease of {TTL_S} s ended {left_s:.2f} s after its renewal")
    if scratch.free_names:
        await directory.takeover(name, token, scratch.other, _nonce())
    return (
        f"renewed twice; {TTL_S:.1f} s granted, over {left_s:.2f} s after the last renewal",
        {"lease_s": TTL_S, "over_after_s": round(left_s, 3)},
    )


async def _outlasted(directory: Directory, node: str, since_s: float) -> float:
    while True:
        lease = await directory.lease(node)
        gone_s = time.monotonic() - since_s
        if lease is None or lease.left_s == 0:
            return gone_s
        if gone_s > TTL_S + LATE_S:
            raise CheckFailed(f"a lease of {TTL_S} s still runs after {gone_s:.1f} s")
        await asyncio.sleep(0.02)


_COMMON: Final[tuple[tuple[str, Check], ...]] = (
    ("speed", _claim),
    ("contenders", _contenders),
    ("fencing", _fencing),
    ("lost replies", _repeat),
    ("watch", _watch),
    ("lease", _lease),
)


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailed(otherwise)
