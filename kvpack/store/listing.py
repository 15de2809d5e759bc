"""What lies in a store, for people and for a node that starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpack.errors import KvpackError
from kvpack.keys import Keyring
from kvpack.store import names
from kvpack.store.cut import open_cut, read_cut
from kvpack.store.errors import NotStoredError
from kvpack.store.interface import ObjectStore, list_all
from kvpack.store.names import Hold


@dataclass(frozen=True, slots=True)
class ListedCut:
    """One cut.

    Attributes:
        cut_id: Its id.
        tenant: Whose; empty where it cannot be read.
        epoch: Under which key; 0 where it cannot be read.
        position: Tokens that it stands for.
        chunks: How many it needs.
        object_bytes: Their bytes, shared ones included.
        holds: Why it is kept, oldest first.
        verified: Whether its MAC was checked with a key.
        problem: Why it cannot be used, or cannot be judged; empty where it can.
    """

    cut_id: bytes
    tenant: str
    epoch: int
    position: int
    chunks: int
    object_bytes: int
    holds: tuple[Hold, ...]
    verified: bool
    problem: str


def list_cuts(store: ObjectStore, keyring: Keyring | None = None) -> Iterator[ListedCut]:
    """Every cut, in order of its id. Reads manifests and no chunk.

    Args:
        store: Which store.
        keyring: Checks the MACs; without it every number is a claim.

    Raises:
        StoreError: The store cannot be listed.
    """
    holds: dict[bytes, list[Hold]] = {}
    for hold in all_holds(store):
        holds.setdefault(hold.cut_id, []).append(hold)
    for item in list_all(store, f"{names.CUTS}/"):
        cut_id = names.cut_id_of(item.name)
        held = sorted(holds.get(cut_id, ()), key=lambda hold: (hold.stamp, hold.lineage))
        try:
            yield _listed(store.get(item.name), cut_id, tuple(held), keyring)
        except NotStoredError:
            continue  # it was deleted since it was listed
        except KvpackError as error:
            yield ListedCut(cut_id, "", 0, 0, 0, 0, tuple(held), False, str(error))


def _listed(
    data: bytes, cut_id: bytes, holds: tuple[Hold, ...], keyring: Keyring | None
) -> ListedCut:
    cut, problem = read_cut(data, cut_id), ""
    if keyring is not None:
        try:
            cut = open_cut(keyring, data, cut_id)
        except KvpackError as error:
            problem = str(error)
    references = cut.manifest.references
    return ListedCut(
        cut_id=cut_id,
        tenant=cut.header.tenant,
        epoch=cut.header.epoch,
        position=cut.position,
        chunks=len(references),
        object_bytes=sum(reference.object_bytes for reference in references),
        holds=holds,
        verified=cut.verified,
        problem=problem,
    )


def all_holds(store: ObjectStore) -> Iterator[Hold]:
    """Every hold of the store."""
    for item in list_all(store, f"{names.HOLDS}/"):
        yield names.parse_hold(item.name)


def cuts_of(store: ObjectStore, lineage: bytes) -> list[Hold]:
    """The cuts of one session, deepest first: where it can be restored."""
    found = list_all(store, names.lineage_prefix(lineage))
    holds = [names.parse_hold(item.name) for item in found]
    return sorted(holds, key=lambda hold: (hold.position, hold.stamp), reverse=True)


def release_session(store: ObjectStore, lineage: bytes) -> int:
    """Drop every hold of a session that was deleted. What nobody else needs is garbage then."""
    return store.delete([hold.name for hold in cuts_of(store, lineage)])
