"""Chunks that a peer sent: whom they may serve, and when they become ours.

A peer that holds the tenant's key can seal any rows under any content id. So its chunks lie under
names of their own, ``peer/CUT-SEAL``, and serve that one cut. A lookup of held chunks and the check
for chunks that need not be written again look only at ``chunks/``. Once this node has recomputed a
content id, the chunk is what its name says, whoever sent it, and it moves to ``chunks/``.

Whether the rows are right for the tokens no recomputation can tell. So a peer's cut never gets into
the prefix index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpack.chunk import ChunkReference
from kvpack.errors import KvpackError
from kvpack.keys import Keyring
from kvpack.store.interface import ObjectData, ObjectStore, list_all
from kvpack.store.names import chunk_name, peer_ids, peer_prefix
from kvpack.store.reader import CutReader


@dataclass(frozen=True, slots=True)
class Adoption:
    """What became of one chunk of a peer.

    Attributes:
        seal_id: Which.
        adopted: It is in ``chunks/`` now.
        reason: A word that says why not: that of an error, or ``conflict``.
    """

    seal_id: bytes
    adopted: bool
    reason: str = ""


def held(store: ObjectStore, references: Sequence[ChunkReference]) -> tuple[bool, ...]:
    """For each reference, whether this node has the chunk and vouches for it.

    Ids compare within one epoch and codec: a chunk that was sealed otherwise counts as not held.
    """
    wanted = [chunk_name(reference.seal_id) for reference in references]
    pairs = zip(references, store.stat(wanted), strict=True)
    return tuple(
        found is not None and found.object_bytes == ref.object_bytes for ref, found in pairs
    )


def adopt_chunks(store: ObjectStore, keyring: Keyring, cut_id: bytes) -> Iterator[Adoption]:
    """Recompute the content ids of a peer's chunks, one at a time: for the background.

    A chunk whose id is not that of its rows stays where it is and goes on serving its own cut,
    which its sender answers for. The cut is held meanwhile, so no collector takes what is adopted.

    Raises:
        NotStoredError: There is no such cut. And what opening it raises.
    """
    reader = CutReader(store, keyring, cut_id)
    by_seal = {reference.seal_id: reference for reference in reader.cut.manifest.references}
    for item in list_all(store, peer_prefix(cut_id)):
        reference = by_seal.get(peer_ids(item.name)[1])
        if reference is not None:
            yield _adopt(store, reader, reference, item.name)


def _adopt(store: ObjectStore, reader: CutReader, reference: ChunkReference, name: str) -> Adoption:
    try:
        data = store.get(name)
        reader.open_object(reference, data, deep=True)
        store.put_if_absent([ObjectData(chunk_name(reference.seal_id), data)])
    except KvpackError as error:
        return Adoption(reference.seal_id, False, error.reason)
    store.delete([name])
    return Adoption(reference.seal_id, True)
