"""The prefix index: which cut is the deepest ancestor of these tokens?

A prefix of k whole blocks has a node for each block; a cut has one entry, under the node of its
last whole block, with a keyed tail over the tokens after it. An index entry is a hint and never an
answer: a hit is a cut whose manifest is authentic, whose token ids equal the asked ones id by id,
and whose chunks are all there. Whatever is damaged, half there or somebody else's is a miss, which
is counted and reported.

For n tokens a lookup makes at most log2(n / 256) + 1 existence checks to find where the chain
leaves the store, and then one listing for each block from there down to the deepest cut, at most
n / 256 + 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvpack import limits
from kvpack.chunk import ChunkClass
from kvpack.errors import KvpackError
from kvpack.header import Header
from kvpack.keys import EpochKey, Keyring
from kvpack.prefix import PrefixScope, pack_ids
from kvpack.store import names
from kvpack.store.cut import StoredCut
from kvpack.store.errors import NotStoredError, StoreError
from kvpack.store.interface import ObjectStore
from kvpack.store.names import TAIL_BYTES, Entry, entries_prefix, node_name, parse_entry
from kvpack.store.reader import CutReader

_BLOCK = limits.GRID_TOKENS

#: Blocks whose entries are asked for at once.
_BLOCKS_MAX = 64


@dataclass(frozen=True, slots=True)
class Miss:
    """A cut that could have been a hit and was none.

    Attributes:
        cut_id: Which; empty where the index itself cannot be read.
        position: Where it was to lie.
        reason: A word: that of an error, or ``not_admitted``, ``other_tokens``, ``no_logits``.
    """

    cut_id: bytes
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a lookup found.

    Attributes:
        cut: The deepest usable cut, or None.
        misses: Deeper cuts that were looked at and could not be used.
        gaps: Blocks whose node is missing although a deeper one is there.
        listings: How many blocks were listed.
        known_tokens: So many of the first tokens, in whole blocks, some kept cut begins with.
        rivals: Cuts that were listed, share these blocks and are not ancestors, deepest first: how
            much further they agree only their own tokens say.
    """

    cut: StoredCut | None
    misses: tuple[Miss, ...]
    gaps: int
    listings: int
    known_tokens: int = 0
    rivals: tuple[bytes, ...] = ()

    @property
    def position(self) -> int:
        """How many tokens need not be computed; 0 for a miss."""
        return 0 if self.cut is None else self.cut.position


def index_names(
    key: EpochKey, header: Header, token_ids: Sequence[int], cut_id: bytes
) -> list[str]:
    """Names that a cut after exactly ``token_ids`` gets in the index: its nodes, then its entry.

    Raises:
        LimitError: There are too many ids, or one is outside its cap.
    """
    scope = PrefixScope(key, header.identity_digest, header.layout_digest)
    links = scope.links(token_ids)
    rest = token_ids[len(token_ids) // _BLOCK * _BLOCK :]
    tail = scope.tail(links[-1], rest)[:TAIL_BYTES]
    nodes = [node_name(link, parent) for parent, link in itertools.pairwise(links)]
    return [*nodes, Entry(links[-1], len(rest), tail, cut_id).name]


def find_deepest(
    store: ObjectStore,
    keyring: Keyring,
    key: EpochKey,
    header: Header,
    token_ids: Sequence[int],
    *,
    admit: Callable[[StoredCut], bool] = lambda _: True,
) -> Lookup:
    """The deepest cut that is an ancestor of ``token_ids``.

    Args:
        store: Which store.
        keyring: The tenant's keys: chunks of an older epoch may be referred to.
        key: Root of the epoch whose index is asked. After a rotation ask again with the older one.
        header: The model and shape that would continue.
        token_ids: The prompt.
        admit: What the caller demands beyond equal tokens, such as equal numerics.

    Raises:
        LimitError: There are too many ids, or one is outside its cap.
    """
    scope = PrefixScope(key, header.identity_digest, header.layout_digest)
    search = _Search(store, keyring, scope, header, token_ids, admit)
    return search.run()


class _Search:
    def __init__(
        self,
        store: ObjectStore,
        keyring: Keyring,
        scope: PrefixScope,
        header: Header,
        token_ids: Sequence[int],
        admit: Callable[[StoredCut], bool],
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._scope = scope
        self._header = header
        self._ids = tuple(token_ids)
        self._admit = admit
        self._links = scope.links(self._ids)
        self._misses: list[Miss] = []
        self._rivals: list[tuple[int, bytes]] = []
        self._without_node: set[int] = set()

    def run(self) -> Lookup:
        try:
            return self._search()
        except StoreError as error:
            # Not even the index can be read: a miss like any other, and as loud.
            self._misses.append(Miss(b"", 0, error.reason))
            return Lookup(None, tuple(self._misses), 0, 0)

    def _search(self) -> Lookup:
        deepest = self._deepest_node()
        gaps = 0
        for listings, (block, listed) in enumerate(self._blocks_up(deepest), start=1):
            gaps += block in self._without_node
            for position, cut_id in self._candidates(block, listed):
                cut = self._open(position, cut_id)
                if cut is not None:
                    return self._answer(cut, gaps, listings, deepest)
        return self._answer(None, gaps, deepest + 1, deepest)

    def _blocks_up(self, deepest: int) -> Iterator[tuple[int, Sequence[str]]]:
        """Blocks from the deepest up, each with the names of its entries; some at a time, more
        each time: most often the first few have the answer."""
        end, count = deepest + 1, 1
        while end > 0:
            blocks = range(end - 1, max(end - count, 0) - 1, -1)
            between = [block for block in blocks if block not in (0, deepest)]
            there = self._store.stat([self._node(block) for block in between])
            self._without_node.update(
                block for block, found in zip(between, there, strict=True) if found is None
            )
            listed = self._store.entries([entries_prefix(self._links[block]) for block in blocks])
            yield from zip(blocks, listed, strict=True)
            end, count = end - len(blocks), min(2 * count, _BLOCKS_MAX)

    def _answer(self, cut: StoredCut | None, gaps: int, listings: int, deepest: int) -> Lookup:
        rivals = tuple(cut_id for _, cut_id in sorted(self._rivals, reverse=True))
        return Lookup(cut, tuple(self._misses), gaps, listings, deepest * _BLOCK, rivals)

    def _node(self, block: int) -> str:
        return node_name(self._links[block], self._links[block - 1])

    def _has_node(self, block: int) -> bool:
        return self._store.stat([self._node(block)])[0] is not None

    def _deepest_node(self) -> int:
        """How many whole blocks of the prompt the chain knows: nodes are there from the root on."""
        low, high = 0, len(self._links) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._has_node(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _candidates(self, block: int, listed: Sequence[str]) -> Iterable[tuple[int, bytes]]:
        """Cuts in this block whose tail is that of the prompt, deepest first."""
        rest_max = min(_BLOCK - 1, len(self._ids) - block * _BLOCK)
        link, first = self._links[block], block * _BLOCK
        tails: dict[int, bytes] = {}
        found: list[tuple[int, bytes]] = []
        for entry in map(parse_entry, listed):
            if entry.rest <= rest_max and entry.rest not in tails:
                tails[entry.rest] = self._tail(link, first, entry.rest)
            fits = entry.rest <= rest_max and entry.tail == tails[entry.rest]
            (found if fits else self._rivals).append((first + entry.rest, entry.cut_id))
        return sorted(found, reverse=True)

    def _tail(self, link: bytes, first: int, rest: int) -> bytes:
        return self._scope.tail(link, self._ids[first : first + rest])[:TAIL_BYTES]

    def _open(self, position: int, cut_id: bytes) -> StoredCut | None:
        """The cut, proved; None and a counted miss where it cannot be used."""
        try:
            reader = CutReader(self._store, self._keyring, cut_id)
            reason = self._objection(reader, position)
        except KvpackError as error:
            reason = error.reason
        if reason:
            self._misses.append(Miss(cut_id, position, reason))
            return None
        return reader.cut

    def _objection(self, reader: CutReader, position: int) -> str:
        """Why the cut cannot be used; empty where it can.

        Raises:
            KvpackError: It, or a chunk of it, is damaged or missing.
        """
        cut = reader.cut
        if cut.header.identity_digest != self._header.identity_digest:
            return "identity_mismatch"
        if cut.position != position or cut.manifest.parent is not None:
            return "other_tokens"
        # A whole prompt has nothing left to compute, so its next logits must have been kept.
        wants_logits = position == len(self._ids)
        if wants_logits and not any(reader.references(ChunkClass.FINAL_LOGITS)):
            return "no_logits"
        if not self._admit(cut):
            return "not_admitted"
        self._require_chunks(cut)
        if reader.packed_token_ids() != pack_ids(self._ids[:position]):
            return "other_tokens"
        return ""

    def _require_chunks(self, cut: StoredCut) -> None:
        wanted = [names.chunk_name(reference.seal_id) for reference in cut.manifest.references]
        for reference, found in zip(
            cut.manifest.references, self._store.stat(wanted), strict=True
        ):  # fmt: skip
            # Only chunks that this node vouches for: the rows of a peer serve its own session.
            if found is None:
                raise NotStoredError(names.chunk_name(reference.seal_id))
            if found.object_bytes != reference.object_bytes:
                raise NotStoredError(names.chunk_name(reference.seal_id))
