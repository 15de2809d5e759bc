"""The taking end of moves. Performs the effects of ``table.TARGET`` and feeds back events.

Order of a commit: gate (at Seal), probe, durable, compare-and-swap, swap. Up to the
compare-and-swap a failure leaves nothing behind; after it the swap cannot fail. In between, where
nobody knows whether it happened, the session serves nowhere until the directory has told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.errors import KvpackError
from node import fault_points
from node.directory import Ownership, OwnershipToken, settle, transfer_settled
from node.errors import (
    DirectoryError,
    InventoryError,
    ReplayError,
    StaleTokenError,
    TransferNotFoundError,
    TransferStateError,
)
from node.migration.admission import (
    Target,
    base_of,
    check_kind,
    check_owner,
    claim,
    find_held,
    let_go,
    open_spool,
    remembered,
    spool_name,
)
from node.migration.book import to_the_end
from node.migration.held import HeldFile, HeldObjects, NothingHeld
from node.migration.inbound import Inbound, Outcome
from node.migration.journal import Entry, TransferKey, Verdict
from node.migration.messages import Inventory, Offer
from node.migration.receiver import Receiver
from node.migration.spool import left_over
from node.migration.streams import Streams
from node.migration.table import (
    TARGET_ENDED,
    TargetEffect,
    TargetEvent,
    TargetState,
)
from node.migration.versions import choose, named, require_kept, require_sealed
from node.transient import is_transient

log = logging.getLogger(__name__)

#: The same while its stream is open: the source may be computing, or waiting for a live session to
#: pause. A source that died ends its stream by a missed ping, and then the lease counts.
STREAM_LEASE_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a transfer: its state, the session's owner, and what ended it, if known."""

    state: TargetState
    owner: Ownership | None
    failure: KvpackError | None


class Transfers(Streams):
    """All transfers into this node."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._preparing = asyncio.Lock()

    async def prepare(self, offer: Offer) -> Inbound:
        """Reserve memory, a private file and a ledger entry for a transfer, or refuse.

        Raises:
            ProtocolVersionError: No version in common, or it began by one that is not spoken here.
            IdentityMismatchError: Another model, tokenizer or tenant; also LayoutMismatchError.
            ConsentError: The numerics differ and nobody consented.
            StaleTokenError: The source does not own the session by that token.
            ReplayError: The number was used.
            NodeBusyError: Too many transfers are under way.
            FencedError: This node's lease is over.
        """
        with self._target.guests.admitting(offer.session_id):
            return await self._prepare(offer)

    async def _prepare(self, offer: Offer) -> Inbound:
        self._target.sessions.lease.require()
        minor = choose(self._target.speaker, offer.speaker)
        check_kind(self._target, offer)
        async with self._preparing:
            known = self._inbound.get(offer.key)
            if known is not None:
                return await self._prepare_again(known, offer)
            await check_owner(self._target, offer)
            held = await self._supersede(offer)
            try:
                self._check_room()
                await self._reserve(offer, minor)
                fault_points.reach("target.reserve.after")
                return await self._begin(offer, TargetEvent.PREPARE, held, minor)
            except BaseException:
                held.close()
                raise

    async def _reserve(self, offer: Offer, minor: int) -> None:
        journal = self._target.journal
        try:
            verdict = await journal.reserve(
                offer.key, offer.digest, offer.session_id, offer.request, minor
            )
        except ReplayError:
            entry = await journal.find(offer.key)
            if entry is not None and entry.state is TargetState.ABORTED:
                # A start that does not speak its version ended it: that is what to say of it.
                require_kept(self._target.speaker, entry.minor, str(offer.key))
            raise
        if verdict is not Verdict.NEW:
            raise ReplayError(f"{offer.key}: its memory was lost with a restart")

    async def reload(self, entry: Entry) -> bool:
        """Open a transfer again that a restart interrupted, with what its spool still holds.

        Returns:
            Whether it is open; otherwise it is as if it had been aborted.
        """
        path = self._target.spool_dir / spool_name(entry.key)
        found = left_over(path)
        offer = remembered(entry)
        if offer is None or not found:
            return False
        try:
            minor = require_kept(self._target.speaker, entry.minor, str(entry.key))
            check_kind(self._target, offer)
            await check_owner(self._target, offer)
            self._check_room()
            for shorter in found[1:]:
                # From a start that was interrupted: it holds less of the same, under the name
                # that this start needs.
                shorter.unlink(missing_ok=True)
            inbound = await self._begin(offer, TargetEvent.RELOAD, NothingHeld(), minor)
        except KvpackError as error:
            log.warning("%s: not reopened after a restart: %s", entry.key, error)
            return False
        await self._take_again(inbound, found[0])
        return inbound.state is TargetState.OPEN

    async def abandon(self, entry: Entry) -> None:
        """End a transfer that a restart interrupted and that cannot be opened again."""
        offer = remembered(entry)
        if offer is not None and offer.copy:
            base = await base_of(self._target, entry)
            if base is not None:
                await let_go(self._target, offer, base)
        await self._target.journal.record(entry.key, TargetState.ABORTED)

    async def seal(self, key: TransferKey, inventory: Inventory) -> int:
        """Gate everything that arrived. Idempotent for the same bytes.

        Raises:
            KvpackError: The gate refuses; the transfer is given up.
        """
        return await to_the_end(self._seal(self._find(key), inventory))

    async def commit(self, key: TransferKey) -> Outcome:
        """Probe, make durable, move ownership, publish. Idempotent.

        Raises:
            ProbeError: The boundary call gave other logits under equal numerics.
            PublishError: The pack could not be made durable.
            StaleTokenError: The source resumed first.
            DirectoryAmbiguousError: Nobody knows yet; ask again.
            FencedError: This node's lease is over, or was while it ran: the session may have been
                taken over since, and its first token is not given out.
        """
        lease = self._target.sessions.lease
        mark = lease.require()
        outcome = await to_the_end(self._commit(self._find(key)))
        lease.require(mark)
        return outcome

    async def abort(self, key: TransferKey) -> TargetState:
        """Give a transfer up, if it can still be given up. Idempotent.

        Returns:
            What became of it; COMMITTED where it was too late.
        """
        inbound = self._inbound.get(key)
        if inbound is None:
            return (await self.status(key)).state
        return await to_the_end(self._abort(inbound))

    async def dismiss(self, session_id: str) -> None:
        """Give up whatever brings a session that nobody waits for any more."""
        async with self._preparing:
            # A Prepare that was admitted before is in the book by now.
            found = [one for one in self._inbound.values() if one.offer.session_id == session_id]
        for inbound in found:
            await to_the_end(self._abort(inbound))

    async def status(self, key: TransferKey) -> Standing:
        """What became of a transfer, from journal and directory.

        Raises:
            TransferNotFoundError: Nothing is remembered of it.
        """
        entry = await self._target.journal.find(key)
        if entry is None:
            raise TransferNotFoundError(f"{key}: unknown here")
        record = await self._target.sessions.directory.owner(entry.session_id)
        owner = record if isinstance(record, Ownership) else None
        inbound = self._inbound.get(key)
        if inbound is None:
            return Standing(entry.state, owner, None)
        # The journal knows only that it is open; how far it got is known while it lives.
        state = entry.state if entry.state in TARGET_ENDED else inbound.state
        return Standing(state, owner, inbound.failure)

    async def watch_leases(self) -> None:
        """Give up transfers that make no progress. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._target.lease_s / 4))
            for inbound in list(self._inbound.values()):
                lease_s = self._target.lease_s
                if inbound.is_streaming:
                    lease_s = max(lease_s, STREAM_LEASE_S)
                if inbound.idle_s() > lease_s and not inbound.lock.locked():
                    await self._end_lease(inbound)

    async def close(self) -> None:
        """Let go of what is not committed; the next start goes on with it, as after a crash."""
        for inbound in list(self._inbound.values()):
            async with inbound.lock:
                if inbound.state not in TARGET_ENDED:
                    inbound.forget_session()
                    await inbound.receiver.suspend()

    async def _supersede(self, offer: Offer) -> HeldObjects:
        """Give up an older transfer of the same session from the same source, but keep its objects.

        A source that restarted offers its session anew, by another number: what it sent before
        needs only be named then.
        """
        older = [
            one
            for one in self._inbound.values()
            if one.state not in TARGET_ENDED
            and (one.offer.key.source, one.offer.session_id) == (offer.key.source, offer.session_id)
        ]
        for inbound in older:
            async with inbound.lock:
                inbound.require(TargetEvent.SUPERSEDED)
                held = await asyncio.to_thread(open_spool, self._target, inbound.offer)
                inbound.failure = TransferStateError(f"superseded by {offer.key}")
                inbound.step(TargetEvent.SUPERSEDED)
                await self._discard(inbound)
                return held
        return await find_held(self._target, offer)

    async def _take_again(self, inbound: Inbound, path: Path) -> None:
        """Take the objects of an old spool file as if they came now; then the file may go."""
        fault_points.reach("target.reload.begun")
        old = await asyncio.to_thread(HeldFile, path, len(inbound.offer.header_bytes))
        try:
            async with inbound.lock:
                await self._take_all(inbound, old)
        finally:
            old.close()
            path.unlink(missing_ok=True)
        log.info("%s: reopened, %d chunks", inbound.offer.key, inbound.receiver.objects)

    async def _take_all(self, inbound: Inbound, old: HeldFile) -> None:
        for chunk in old.objects():
            try:
                await inbound.receiver.take(memoryview(chunk))
                fault_points.reach("target.reload.taken")
            except InventoryError:
                # The rest belongs behind the cut of a growing transfer, which nobody told us yet.
                return
            except KvpackError as error:
                await self._give_up(inbound, TargetEvent.PIECE_BAD, error)
                return

    async def _prepare_again(self, known: Inbound, offer: Offer) -> Inbound:
        if known.offer.digest != offer.digest:
            raise ReplayError(f"{offer.key}: open for another Prepare")
        async with known.lock:
            if known.state in TARGET_ENDED:
                raise ReplayError(f"{offer.key}: ended as {known.state.value}")
            known.step(TargetEvent.PREPARE_AGAIN)
            # What of an older stream is still on its way must not mix with the next one.
            known.end_stream()
        return known

    async def _begin(
        self, offer: Offer, event: TargetEvent, held: HeldObjects, minor: int
    ) -> Inbound:
        target, key = self._target, offer.key
        path = target.spool_dir / spool_name(key)
        base: OwnershipToken | None = None
        try:
            base = offer.token or await claim(self._target, offer)
            fault_points.reach("target.claim.after")
            receiver = await Receiver.begin(
                target.engine,
                target.binding,
                offer,
                lambda: target.pack_of(offer.session_id, path, offer.header_bytes),
                held,
            )
        except KvpackError:
            if base is not None:
                await let_go(self._target, offer, base)
            await target.journal.record(key, TargetState.ABORTED)
            raise
        exact = target.binding.owns(offer.numerics)
        inbound = Inbound(offer, base, receiver, path, exact, minor)
        inbound.step(event)
        self._inbound[key] = inbound
        self._forget_ended()
        log.info(
            "%s: open, session %s, %d tokens, by %s", key, offer.session_id, offer.position,
            named(minor),
        )  # fmt: skip
        return inbound

    async def _seal(self, inbound: Inbound, inventory: Inventory) -> int:
        async with inbound.lock:
            if inbound.inventory is not None:
                inbound.require_same(inventory)
                inbound.step(TargetEvent.SEAL)
                return inbound.receiver.objects
            inbound.require(TargetEvent.SEAL)
            try:
                require_sealed(inbound.minor, inventory.minor)
                inbound.require_no_stream()
                await inbound.accept(inventory, self._target.engine.model.vocab_size)
                fault_points.reach("target.gate.after")
            except KvpackError as error:
                await self._give_up(inbound, TargetEvent.SEAL_BAD, error)
                raise
            inbound.step(TargetEvent.SEAL)
            return inbound.receiver.objects

    async def _commit(self, inbound: Inbound) -> Outcome:
        async with inbound.lock:
            return await self._drive(inbound, inbound.step(TargetEvent.COMMIT))

    async def _abort(self, inbound: Inbound) -> TargetState:
        async with inbound.lock:
            effect = inbound.step(TargetEvent.ABORT)
            if effect is TargetEffect.DISCARD:
                await self._discard(inbound)
            elif effect is TargetEffect.SETTLE:
                await self._settle_quietly(inbound, effect)
            return inbound.state

    async def _drive(self, inbound: Inbound, effect: TargetEffect) -> Outcome:
        """Perform effects until the transfer waits or has ended."""
        while True:
            if effect is TargetEffect.ANSWER:
                return inbound.answer()
            if effect is TargetEffect.SWAP:
                fault_points.reach("target.swap.before")
                self._swap(inbound)
                await self._record(inbound)
                fault_points.reach("target.record.after")
                return inbound.answer()
            if effect is TargetEffect.DISCARD:
                await self._discard(inbound)
                raise inbound.require_failure()
            effect = inbound.step(await self._perform(inbound, effect))

    async def _perform(self, inbound: Inbound, effect: TargetEffect) -> TargetEvent:
        start, session_id = time.monotonic(), inbound.offer.session_id
        try:
            if effect is TargetEffect.PROBE:
                await inbound.probe(self._target.engine, keep=not is_transient(session_id))
                fault_points.reach("target.probe.after")
                event = TargetEvent.PROBE_GOOD
            elif effect is TargetEffect.PUBLISH:
                await inbound.receiver.publish()
                event = TargetEvent.PUBLISHED
            else:
                event = await self._transfer(inbound, effect)
        except KvpackError as error:
            inbound.failure = error
            event = _FAILED[effect]
        inbound.took(effect, time.monotonic() - start)
        return event

    async def _transfer(self, inbound: Inbound, effect: TargetEffect) -> TargetEvent:
        """The commit point: one compare-and-swap, settled by its nonce where its reply is lost."""
        sessions, offer = self._target.sessions, inbound.offer
        move = settle if effect is TargetEffect.SETTLE else transfer_settled
        try:
            fault_points.reach("target.cas.before")
            inbound.token = await move(
                sessions.directory, offer.session_id, inbound.base, sessions.node, offer.nonce
            )
        except StaleTokenError as error:
            inbound.failure = error
            return TargetEvent.CAS_LOST
        except DirectoryError as error:
            inbound.failure = error
            return TargetEvent.CAS_UNKNOWN
        fault_points.reach("target.cas.after")
        return TargetEvent.CAS_WON

    def _swap(self, inbound: Inbound) -> None:
        start = time.monotonic()
        session = inbound.take_session()
        self._target.sessions.adopt(session)
        keeps = self._target.keeps(session.session_id)
        if self._target.tier is not None and session.spool is not None and keeps:
            self._target.tier.keep_later(session.session_id, session.spool, own=False)
        inbound.took(TargetEffect.SWAP, time.monotonic() - start)
        log.info("%s: committed, revision %d", inbound.offer.key, session.token.revision)

    async def _end_lease(self, inbound: Inbound) -> None:
        async with inbound.lock:
            if not inbound.permits(TargetEvent.LEASE_OVER):
                return
            effect = inbound.step(TargetEvent.LEASE_OVER)
            if effect is TargetEffect.DISCARD:
                inbound.failure = TransferStateError("no progress for the lease")
                log.warning("%s: no progress for the lease", inbound.offer.key)
                await self._discard(inbound)
            else:
                await self._settle_quietly(inbound, effect)

    async def _settle_quietly(self, inbound: Inbound, effect: TargetEffect) -> None:
        try:
            await self._drive(inbound, effect)
        except KvpackError as error:
            log.warning("%s: %s", inbound.offer.key, error)


_FAILED: Final = {
    TargetEffect.PROBE: TargetEvent.PROBE_BAD,
    TargetEffect.PUBLISH: TargetEvent.PUBLISH_FAILED,
    TargetEffect.TRANSFER: TargetEvent.CAS_UNKNOWN,
    TargetEffect.SETTLE: TargetEvent.CAS_UNKNOWN,
}
