"""After a restart: a session whose cut came to lie in a store, but which never became the store's.

The value that is put before the compare-and-swap tells. Where it was put under the very token that
the session is still owned by, the process ended in between: nothing was served since the freeze, so
the cut is the session, newer than any pack of it here. It is fetched back as such a pack. A value
under an older token says nothing: the session was served since.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from pathlib import Path

from kvpack.errors import FormatError, KvpackError
from kvpack.keys import Keyring
from kvpack.publish import publish_new
from kvpack.store import CutReader, export_bundle
from node.directory import Ownership
from node.migration.admission import Target, spool_name
from node.migration.journal import TransferKey
from node.migration.table import TargetState
from node.parked import Parked, store_owner
from node.stores import StoreRoots

log = logging.getLogger(__name__)


async def fetch_back(target: Target, roots: StoreRoots, entry: Ownership) -> str | None:
    """The name of a new pack of ``entry``'s session; None where no store has anything newer.

    Raises:
        KvpackError: A store has, but it cannot be read: nothing older may be served instead.
    """
    published = await target.sessions.directory.published(entry.session_id)
    if published is None or published.token != entry.token:
        return None
    try:
        parked = Parked.decode(published.value)
    except KvpackError:
        return None
    key = await _reserve(target, parked, entry.session_id)
    name = spool_name(key)
    await asyncio.to_thread(_export, target, roots, parked, target.spool_dir / name)
    await target.journal.record(key, TargetState.COMMITTED, name)
    log.info("session %s: fetched back from a store that never owned it", entry.session_id)
    return name


async def _reserve(target: Target, parked: Parked, session_id: str) -> TransferKey:
    epoch, owner = target.binding.key.epoch, store_owner(parked.identity)
    number = await target.journal.next_number(owner, epoch)
    key = TransferKey(epoch, owner, number << 40)
    digest = hashlib.sha256(parked.encode()).digest()
    await target.journal.reserve(key, digest, session_id)
    return key


def _export(target: Target, roots: StoreRoots, parked: Parked, path: Path) -> None:
    keyring = Keyring([target.binding.key])
    with roots.opened(parked.place) as store:
        if store.identity(parked.identity) != parked.identity:
            raise FormatError("store.identity", parked.identity.hex(), "another store")
        CutReader(store, keyring, parked.cut_id).check(deep=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with publish_new(path) as sink:
            export_bundle(store, keyring, parked.cut_id, sink)
