"""Check: is everything in the store whole? Reports, and never stops at what it finds.

What is found is told as it is found, and what has to be remembered on the way lies in a private
database, so memory does not grow with the store.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpack import limits
from kvpack.errors import KvpackError, UnknownKeyError
from kvpack.keys import Keyring
from kvpack.store import names
from kvpack.store.chain import Chain, read_chains
from kvpack.store.errors import NotStoredError
from kvpack.store.interface import ObjectStore, StoredObject
from kvpack.store.mark import marks_of
from kvpack.store.reader import CutReader
from kvpack.store.seen import IdTables, Table
from kvpack.store.steps import drive


class Severity(enum.Enum):
    """DAMAGE: a cut cannot be restored as it was saved. NOTE: nothing is lost."""

    DAMAGE = "damage"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        severity: Whether something is lost.
        name: Which object or file.
        reason: A stable word.
        detail: For people.
    """

    severity: Severity
    name: str
    reason: str
    detail: str


def check_store(
    store: ObjectStore,
    keyring: Keyring,
    *,
    deep: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Finding]:
    """Look at every file, open every chunk that a cut names, and report what is wrong.

    A chunk that several cuts name is opened once. Memory is one chunk, one manifest and some MiB,
    however large the store is; what else has to be remembered lies in a temporary file.

    Args:
        store: Which store. It may be in use: what comes and goes meanwhile is not reported.
        keyring: Cuts of other tenants are noted and not judged.
        deep: Recompute every content id too.
        progress: Told the bytes of every chunk that was looked at.

    Raises:
        StoreError: The store cannot be listed at all.
        VersionError: Something of a newer version lies here.
    """
    with IdTables() as tables:
        yield from _Check(store, keyring, tables, deep, progress or (lambda _: None)).run()


class _Check:
    def __init__(
        self,
        store: ObjectStore,
        keyring: Keyring,
        tables: IdTables,
        deep: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._tables = tables
        self._deep = deep
        self._progress = progress
        self._pins: frozenset[str] = frozenset()
        #: Digests of the models that were met, so that a row needs no 32 bytes for one.
        self._models: dict[bytes, bytes] = {}

    def run(self) -> Iterator[Finding]:
        yield from self._irregular()
        # Intents before holds before cuts: what a writer has in hand is then seen in one of them.
        for chain in self._read_pins():
            if not chain.is_readable:
                name = f"{names.INTENTS}/{chain.writer_id.hex()}"
                yield _note(name, "damaged_intent", "what it pins cannot be told")
        holds = [names.parse_hold(item.name) for item in self._store.scan(f"{names.HOLDS}/")]
        for item in self._store.scan(f"{names.CUTS}/"):
            self._tables.add(Table.CUTS, names.cut_id_of(item.name), 0)
        for cut_id in self._tables.keys(Table.CUTS):
            yield from self._check_cut(cut_id)
        for hold in sorted(holds, key=lambda hold: hold.name):
            if not self._knows(hold.cut_id) and self._is_left(hold.name):
                yield _note(hold.name, "dangling_hold", "its cut is gone")
        yield from self._entries()
        yield from self._garbage()

    def _read_pins(self) -> list[Chain]:
        chains = drive(self._store, read_chains(), lambda: None)
        self._pins |= frozenset().union(*(chain.pins for chain in chains if chain.is_open))
        return chains

    def _irregular(self) -> Iterator[Finding]:
        for item in self._store.irregular():
            if item.is_leftover:
                detail = f"{item.file_bytes} bytes that a crashed writer left"
                yield _note(item.name, "leftover", detail)
            else:
                detail = f"{item.file_bytes} bytes that are not the store's"
                yield _note(item.name, "stray", detail)

    def _knows(self, cut_id: bytes) -> bool:
        """Whether a cut is there: when the check began, or by now."""
        if self._tables.has(Table.CUTS, cut_id):
            return True
        return self._store.stat([names.cut_name(cut_id)])[0] is not None

    def _is_left(self, name: str) -> bool:
        """Whether what leads nowhere is still there, and no writer is about to make it lead on."""
        return name not in self._pins and self._store.stat([name])[0] is not None

    def _check_cut(self, cut_id: bytes) -> Iterator[Finding]:
        name = names.cut_name(cut_id)
        try:
            data = self._store.get(name)
        except NotStoredError:
            return  # it was collected since it was listed
        except KvpackError as error:
            yield Finding(Severity.DAMAGE, name, error.reason, str(error))
            return
        marks = marks_of(data, cut_id)
        self._tables.set(Table.CUTS, cut_id, marks.position)
        self._tables.add_all(Table.NEEDED, marks.each_seal_id())
        try:
            reader = CutReader(self._store, self._keyring, cut_id, data)
        except UnknownKeyError as error:
            yield _note(name, error.reason, str(error))
            return
        except KvpackError as error:
            yield Finding(Severity.DAMAGE, name, error.reason, str(error))
            return
        yield from self._check_chunks(name, reader)

    def _check_chunks(self, name: str, reader: CutReader) -> Iterator[Finding]:
        """Open the chunks of a cut that no other cut of this model had opened."""
        digest = reader.cut.header.identity_digest
        model = self._models.setdefault(digest, len(self._models).to_bytes(4, "little"))
        for reference in reader.cut.manifest.references:
            # The same chunk under another model would not open: the pair is what was checked.
            if not self._tables.add(Table.OPENED, reference.seal_id + model):
                continue
            try:
                reader.open(reference, deep=self._deep)
            except UnknownKeyError as error:
                yield _note(name, error.reason, str(error))
            except KvpackError as error:
                if self._store.stat([name])[0] is None:
                    return
                chunk = names.chunk_name(reference.seal_id)
                detail = f"{error}; needed by {name}"
                yield Finding(Severity.DAMAGE, chunk, error.reason, detail)
            self._progress(reference.object_bytes)

    def _entries(self) -> Iterator[Finding]:
        """Entries that lead nowhere, or that not every token leads to: a miss, nothing more."""
        for item in self._store.scan(f"{names.NODES}/"):
            link, parent = names.node_links(item.name)
            self._tables.add(Table.PARENTS, bytes.fromhex(link), bytes.fromhex(parent))
        for shard in names.SHARDS:
            found = self._store.scan(f"{names.ENTRIES}/{shard}/")
            for name in sorted(item.name for item in found):
                yield from self._entry(name)

    def _entry(self, name: str) -> Iterator[Finding]:
        entry = names.parse_entry(name)
        position = self._tables.number(Table.CUTS, entry.cut_id)
        if position is None:
            if not self._knows(entry.cut_id) and self._is_left(name):
                yield _note(name, "dangling_entry", "its cut is gone")
            return
        expected = position // limits.GRID_TOKENS
        found = self._depth(entry.link, expected)
        if found < expected and self._store.stat([name])[0] is not None:
            detail = f"{found} of {expected} nodes lead to it: its tokens may not find it"
            yield _note(name, "missing_node", detail)

    def _depth(self, link: bytes, most: int) -> int:
        """How many nodes lie above and at ``link``, before the first that is missing."""
        depth = 0
        while depth < most:
            parent = self._tables.bytes_of(Table.PARENTS, link)
            if parent is None:
                break
            link, depth = parent, depth + 1
        return depth

    def _garbage(self) -> Iterator[Finding]:
        """Chunks that no cut needs: a collector would take them, after the writers are done."""
        for item in self._store.scan(f"{names.CHUNKS}/"):
            if not self._tables.has(Table.NEEDED, bytes.fromhex(item.name.partition("/")[2])):
                self._suspect(item)
        for item in self._store.scan(f"{names.PEER}/"):
            self._tables.add(Table.PEERS, b"".join(names.peer_ids(item.name)), item.object_bytes)
        self._suspect_peers()
        if next(self._tables.keys(Table.SUSPECTS), None) is None:
            return
        # They were listed before this: whoever needs them by now is seen here.
        self._read_pins()
        for item in self._store.scan(f"{names.CUTS}/"):
            cut_id = names.cut_id_of(item.name)
            if not self._tables.has(Table.CUTS, cut_id):
                self._tables.add_all(Table.NEEDED, self._seal_ids(cut_id))
        for key in self._tables.keys(Table.SUSPECTS):
            name, size = key.decode(), self._tables.number(Table.SUSPECTS, key)
            needed = self._tables.has(Table.NEEDED, bytes.fromhex(name[-64:]))
            if (names.kind_of(name) == names.PEER or not needed) and self._is_left(name):
                yield _note(name, "garbage", f"{size} bytes that no cut needs")

    def _suspect(self, item: StoredObject) -> None:
        self._tables.add(Table.SUSPECTS, item.name.encode(), item.object_bytes)

    def _suspect_peers(self) -> None:
        """A peer's chunk serves one cut: those of each cut are compared with what it names."""
        for cut_id, keys in itertools.groupby(self._tables.keys(Table.PEERS), lambda key: key[:32]):
            needed = frozenset(self._seal_ids(cut_id))
            for key in keys:
                size = self._tables.number(Table.PEERS, key)
                if key[32:] not in needed and size is not None:
                    self._suspect(StoredObject(names.peer_name(cut_id, key[32:]), size, 0.0))

    def _seal_ids(self, cut_id: bytes) -> Iterator[bytes]:
        try:
            data = self._store.get(names.cut_name(cut_id))
        except KvpackError:
            return
        yield from marks_of(data, cut_id).each_seal_id()


def _note(name: str, reason: str, detail: str) -> Finding:
    return Finding(Severity.NOTE, name, reason, detail)
