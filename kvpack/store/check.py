"""Check: is everything in the store whole? Reports, and never stops at what it finds."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpack import limits
from kvpack.errors import KvpackError, UnknownKeyError
from kvpack.keys import Keyring
from kvpack.store import names
from kvpack.store.errors import NotStoredError
from kvpack.store.interface import ObjectStore
from kvpack.store.plan import Inventory, take_inventory
from kvpack.store.reader import CutReader


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

    A chunk that several cuts name is opened once. Memory is one chunk and the list of names.

    Args:
        store: Which store. It may be in use: what comes and goes meanwhile is not reported.
        keyring: Cuts of other tenants are noted and not judged.
        deep: Recompute every content id too.
        progress: Told the bytes of every chunk that was looked at.

    Raises:
        StoreError: The store cannot be listed at all.
        VersionError: Something of a newer version lies here.
    """
    inventory = take_inventory(store)
    yield from _irregular(inventory)
    opened: set[tuple[bytes, bytes]] = set()
    for cut_id in inventory.roots.cuts:
        for bytes_done, finding in _check_cut(store, keyring, cut_id, opened, deep=deep):
            if progress is not None:
                progress(bytes_done)
            if finding is not None:
                yield finding
    yield from _dangling(inventory)
    yield from _unreferenced(inventory)


def _irregular(inventory: Inventory) -> Iterator[Finding]:
    for item in inventory.irregular:
        if item.is_leftover:
            detail = f"{item.file_bytes} bytes that a crashed writer left"
            yield Finding(Severity.NOTE, item.name, "leftover", detail)
        else:
            detail = f"{item.file_bytes} bytes that are not the store's"
            yield Finding(Severity.NOTE, item.name, "stray", detail)
    for chain in inventory.roots.chains:
        if not chain.is_readable:
            name = f"{names.INTENTS}/{chain.writer_id.hex()}"
            yield Finding(Severity.NOTE, name, "damaged_intent", "what it pins cannot be told")


def _check_cut(
    store: ObjectStore,
    keyring: Keyring,
    cut_id: bytes,
    opened: set[tuple[bytes, bytes]],
    *,
    deep: bool,
) -> Iterator[tuple[int, Finding | None]]:
    """For every chunk its bytes, and what is wrong with it."""
    name = names.cut_name(cut_id)
    try:
        reader = CutReader(store, keyring, cut_id)
    except NotStoredError:
        return  # it was collected since it was listed
    except UnknownKeyError as error:
        yield 0, Finding(Severity.NOTE, name, error.reason, str(error))
        return
    except KvpackError as error:
        yield 0, Finding(Severity.DAMAGE, name, error.reason, str(error))
        return
    header = reader.cut.header
    for reference in reader.cut.manifest.references:
        # The same chunk under another model would not open: the pair is what was checked.
        checked = (reference.seal_id, header.identity_digest)
        if checked in opened:
            continue
        opened.add(checked)
        finding = None
        try:
            reader.open(reference, deep=deep)
        except UnknownKeyError as error:
            finding = Finding(Severity.NOTE, name, error.reason, str(error))
        except KvpackError as error:
            if store.stat([name])[0] is None:
                return
            chunk = names.chunk_name(reference.seal_id)
            detail = f"{error}; needed by {name}"
            finding = Finding(Severity.DAMAGE, chunk, error.reason, detail)
        yield reference.object_bytes, finding


def _dangling(inventory: Inventory) -> Iterator[Finding]:
    """Names that lead nowhere: a miss or a leftover, nothing more."""
    roots = inventory.roots
    pins = roots.pins()
    for hold in roots.holds:
        if hold.cut_id not in roots.cuts and hold.name not in pins:
            yield Finding(Severity.NOTE, hold.name, "dangling_hold", "its cut is gone")
    parents = dict(map(names.node_links, inventory.names(names.NODES)))
    for name in inventory.names(names.ENTRIES):
        entry = names.parse_entry(name)
        cut = roots.cuts.get(entry.cut_id)
        if cut is None:
            if name not in pins:
                yield Finding(Severity.NOTE, name, "dangling_entry", "its cut is gone")
            continue
        expected = cut.position // limits.GRID_TOKENS
        found = _depth(entry.link.hex(), parents, expected)
        if found < expected:
            detail = f"{found} of {expected} nodes lead to it: its tokens may not find it"
            yield Finding(Severity.NOTE, name, "missing_node", detail)


def _depth(link: str, parents: dict[str, str], most: int) -> int:
    """How many nodes lie above and at ``link``, before the first that is missing."""
    depth = 0
    while depth < most and link in parents:
        link, depth = parents[link], depth + 1
    return depth


def _unreferenced(inventory: Inventory) -> Iterator[Finding]:
    """What no cut needs: a collector would take it, after the writers at work are done."""
    needed = set(inventory.roots.pins())
    for cut in inventory.roots.cuts.values():
        needed.update(cut.object_names())
    for kind in (names.CHUNKS, names.PEER):
        for item in inventory.objects[kind]:
            if item.name not in needed:
                detail = f"{item.object_bytes} bytes that no cut needs"
                yield Finding(Severity.NOTE, item.name, "garbage", detail)
