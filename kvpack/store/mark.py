"""What a collector must keep: everything that a held cut or a live intent names.

Needs no key: manifests are in the clear, and nodes of the prefix chain name their parents. A cut
that cannot be parsed pins nothing, because nobody could restore it either; one of a newer version
stops the collector altogether.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvpack.errors import KvpackError, VersionError
from kvpack.store import names
from kvpack.store.chain import Chain, read_chains
from kvpack.store.cut import read_cut
from kvpack.store.errors import NotStoredError, StoreError
from kvpack.store.names import Hold
from kvpack.store.retention import cut_cadence_tokens
from kvpack.store.steps import Steps, get, list_names


@dataclass(frozen=True, slots=True)
class CutMarks:
    """What one cut needs, in the fewest bytes.

    Attributes:
        cut_id: Which cut.
        position: Tokens that it stands for.
        cadence_tokens: Distance between cuts of its layout, for the retention rule.
        seal_ids: The seal ids of its references, 32 bytes each, one after the other.
        damage: Why it cannot be read; empty where it can.
    """

    cut_id: bytes
    position: int
    cadence_tokens: int
    seal_ids: bytes
    damage: str = ""

    def chunk_names(self) -> Iterator[tuple[str, str]]:
        """For each chunk, where it may lie: ``(shared name, peer's name)``."""
        for offset in range(0, len(self.seal_ids), 32):
            seal_id = self.seal_ids[offset : offset + 32]
            yield names.chunk_name(seal_id), names.peer_name(self.cut_id, seal_id)

    def object_names(self) -> Iterator[str]:
        """All names under which its chunks may lie."""
        for pair in self.chunk_names():
            yield from pair


#: Cuts are immutable: what was parsed once under a name stays true.
CutCache = dict[str, CutMarks]


@dataclass(frozen=True, slots=True)
class Roots:
    """From where everything is reached, as read in this order: intents, holds, cuts.

    A writer appends to its intent, then makes hold and cut, then ends its intent. Whoever reads in
    this order sees at least one of them.
    """

    chains: tuple[Chain, ...]
    holds: tuple[Hold, ...]
    cuts: Mapping[bytes, CutMarks]

    def pins(self) -> frozenset[str]:
        """Everything that some open intent names."""
        return frozenset().union(*(chain.pins for chain in self.chains if chain.is_open))


def read_roots(cache: CutCache) -> Steps[Roots]:
    """Read intents, holds and cuts.

    Raises:
        VersionError: Something of a newer version lies here.
        StoreError: Something cannot be read at all.
    """
    chains = yield from read_chains()
    holds = [names.parse_hold(item.name) for item in (yield from list_names(f"{names.HOLDS}/"))]
    cuts = {}
    for item in (yield from list_names(f"{names.CUTS}/")):
        if item.name not in cache:
            try:
                data = yield from get(item.name)
            except NotStoredError:
                continue
            cache[item.name] = marks_of(data, names.cut_id_of(item.name))
        cuts[cache[item.name].cut_id] = cache[item.name]
    return Roots(tuple(chains), tuple(holds), cuts)


def marks_of(data: bytes, cut_id: bytes) -> CutMarks:
    """What a cut needs, by its own word.

    Raises:
        VersionError: It is of a newer version.
    """
    try:
        cut = read_cut(data, cut_id)
    except VersionError:
        raise
    except KvpackError as error:
        return CutMarks(cut_id, 0, 1, b"", str(error))
    seal_ids = b"".join(reference.seal_id for reference in cut.manifest.references)
    return CutMarks(cut_id, cut.position, cut_cadence_tokens(cut.header.layout), seal_ids)


def live_cuts(roots: Roots, pins: frozenset[str], dropped: frozenset[str]) -> set[bytes]:
    """Ids of the cuts that stay when the holds named in ``dropped`` go."""
    held = {hold.cut_id for hold in roots.holds if hold.name in pins or hold.name not in dropped}
    held |= {names.cut_id_of(name) for name in pins if names.kind_of(name) == names.CUTS}
    return {cut_id for cut_id in held if cut_id in roots.cuts and not roots.cuts[cut_id].damage}


def live_names(
    roots: Roots, dropped: frozenset[str], entries: Iterable[str], nodes: Iterable[str]
) -> set[str]:
    """Names of everything that must stay.

    Args:
        roots: What was read.
        dropped: Names of holds that are to go, unless an intent names them.
        entries: Names of all entries of the prefix index.
        nodes: Names of all its nodes.
    """
    pins = roots.pins()
    cuts = live_cuts(roots, pins, dropped)
    live = set(pins)
    for cut_id in cuts:
        live.add(names.cut_name(cut_id))
        live.update(roots.cuts[cut_id].object_names())
    live.update(
        hold.name for hold in roots.holds if hold.cut_id in cuts and hold.name not in dropped
    )
    kept = [name for name in entries if name in live or names.parse_entry(name).cut_id in cuts]
    live.update(kept)
    live.update(_ancestors(kept, nodes))
    return live


def _ancestors(entries: Iterable[str], nodes: Iterable[str]) -> set[str]:
    """Nodes from which the entries hang: each entry's own, its parent, and so on to the root."""
    parents = dict(map(names.node_links, nodes))
    reached: set[str] = set()
    for entry in entries:
        link = names.parse_entry(entry).link.hex()
        while (parent := parents.get(link)) is not None:
            node = names.node_name(bytes.fromhex(link), bytes.fromhex(parent))
            if node in reached:
                break
            reached.add(node)
            link = parent
    return reached


def require_readable(chains: Iterable[Chain], now: int, patience_s: int) -> None:
    """Refuse to collect while it cannot be told what a recent intent pins.

    Raises:
        StoreError: Names the writer.
    """
    for chain in chains:
        if not chain.is_readable and chain.modified_s + patience_s >= now:
            raise StoreError(
                f"intent {chain.writer_id.hex()}: damaged, so nothing can be collected before it "
                f"is {patience_s} seconds old"
            )
