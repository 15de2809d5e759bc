"""What a collector must keep: everything that a held cut or a live intent names.

Needs no key: manifests are in the clear, and nodes of the prefix chain name their parents. A cut
that cannot be parsed pins nothing, because nobody could restore it either; one of a newer version
stops the collector altogether.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvpack.errors import KvpackError, VersionError
from kvpack.header import decode_header
from kvpack.manifest.sealed import read_seal_ids
from kvpack.store import names
from kvpack.store.chain import Chain, read_chains
from kvpack.store.cut import split_cut
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

    def each_seal_id(self) -> Iterator[bytes]:
        """The seal ids one by one, 32 bytes each."""
        for offset in range(0, len(self.seal_ids), 32):
            yield self.seal_ids[offset : offset + 32]

    def needs(self, seal_id: bytes) -> bool:
        """Whether ``seal_id`` is among them."""
        at = self.seal_ids.find(seal_id)
        while at >= 0 and at % 32:
            at = self.seal_ids.find(seal_id, at + 1)
        return at >= 0

    def chunk_names(self) -> Iterator[tuple[str, str]]:
        """For each chunk, where it may lie: ``(shared name, peer's name)``."""
        for seal_id in self.each_seal_id():
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
        header_bytes, blob = split_cut(data, cut_id)
        cadence_tokens = cut_cadence_tokens(decode_header(header_bytes).layout)
        position, seal_ids = read_seal_ids(blob)
    except VersionError:
        raise
    except KvpackError as error:
        return CutMarks(cut_id, 0, 1, b"", str(error))
    return CutMarks(cut_id, position, cadence_tokens, seal_ids)


def live_cuts(roots: Roots, pins: frozenset[str], dropped: frozenset[str]) -> set[bytes]:
    """Ids of the cuts that stay when the holds named in ``dropped`` go."""
    held = {hold.cut_id for hold in roots.holds if hold.name in pins or hold.name not in dropped}
    held |= {names.cut_id_of(name) for name in pins if names.kind_of(name) == names.CUTS}
    return {cut_id for cut_id in held if cut_id in roots.cuts and not roots.cuts[cut_id].damage}


@dataclass(frozen=True, slots=True, repr=False)
class Live:
    """Everything that must stay: ``name in live``. Chunks and nodes by their ids, which are many.

    Attributes:
        named: Names that stay whatever needs them: pinned ones, holds, entries.
        cuts: What each cut that stays needs.
        seal_ids: Seal ids of all of them.
        links: Links of the nodes that stay.
    """

    named: set[str]
    cuts: dict[bytes, CutMarks]
    seal_ids: set[bytes]
    links: set[bytes]

    def __contains__(self, name: str) -> bool:
        if name in self.named:
            return True
        kind, _, text = name.partition("/")
        if kind == names.CHUNKS:
            return bytes.fromhex(text) in self.seal_ids
        if kind == names.CUTS:
            return bytes.fromhex(text) in self.cuts
        if kind == names.NODES:
            return bytes.fromhex(text[:64]) in self.links
        if kind == names.PEER:
            cut_id, seal_id = names.peer_ids(name)
            marks = self.cuts.get(cut_id)
            return marks is not None and marks.needs(seal_id)
        return False


def live_names(
    roots: Roots,
    dropped: frozenset[str],
    entries: Iterable[str],
    nodes: Iterable[bytes],
    settled: frozenset[bytes] = frozenset(),
) -> Live:
    """Everything that must stay.

    Args:
        roots: What was read.
        dropped: Names of holds that are to go, unless an intent names them.
        entries: Names of all entries of the prefix index.
        nodes: Link and parent of all its nodes, joined, 64 bytes.
        settled: Cuts of which it is known that none of their chunks is asked for: they are left
            out of ``seal_ids``.
    """
    pins = roots.pins()
    cuts = live_cuts(roots, pins, dropped)
    named = set(pins)
    named.update(
        hold.name for hold in roots.holds if hold.cut_id in cuts and hold.name not in dropped
    )
    kept = [name for name in entries if name in named or names.parse_entry(name).cut_id in cuts]
    named.update(kept)
    seal_ids: set[bytes] = set()
    for cut_id in cuts - settled:
        seal_ids.update(roots.cuts[cut_id].each_seal_id())
    marks = {cut_id: roots.cuts[cut_id] for cut_id in cuts}
    return Live(named, marks, seal_ids, _ancestors(kept, nodes))


def _ancestors(entries: Iterable[str], nodes: Iterable[bytes]) -> set[bytes]:
    """Links of the nodes from which the entries hang: each entry's own, its parent, and so on."""
    parents = {node[:32]: node[32:] for node in nodes}
    reached: set[bytes] = set()
    for entry in entries:
        link = names.parse_entry(entry).link
        while link not in reached and (parent := parents.get(link)) is not None:
            reached.add(link)
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
