"""Where two packs differ first: which field, and which layer and position. Never what is there.

Token ids are the user's text and rows are nearly so, hence only their places come out of here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from kvpack import limits
from kvpack.bundle import BundleReader
from kvpack.chunk import ChunkClass, ChunkReference, OpenedChunk, tile_of
from kvpack.chunk.reference import TOKEN_ID_BYTES
from kvpack.errors import FieldError, IdentityMismatchError, LayoutMismatchError
from kvpack.identity import (
    CallRun,
    CallSchedule,
    NumericsFingerprint,
    require_same_identity,
    require_same_layout,
)
from kvpack.layout import CacheLayout
from kvpack.manifest import Component, ComponentKind, Manifest


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that differs, and what each pack says.

    Attributes:
        field: A path such as ``layers[7].kv_heads`` or ``numerics.mlx``.
        first: What the first pack says.
        second: What the second one says.
    """

    field: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class PayloadDifference:
    """A place where both packs have something, and not the same.

    Attributes:
        chunk_class: What is there.
        position: Absolute position of the first row or token that differs.
        layer: Which layer, or None where the class has none.
        role: ``key`` or ``value``, or empty.
    """

    chunk_class: ChunkClass
    position: int
    layer: int | None = None
    role: str = ""


Difference = FieldDifference | PayloadDifference

#: What both packs may have a piece of: class, layers, grid block and part.
_Slot = tuple[int, ChunkClass, tuple[int, ...], int]


def compare_packs(first: BundleReader, second: BundleReader) -> Iterator[Difference]:
    """The first difference of each kind: tenant, identity, layout, manifest, tokens, rows, states.

    Payload is compared only where both packs hold it. Chunks that have one content id are not
    opened; memory is two chunks.

    Args:
        first: A pack, authentic.
        second: Another one.

    Raises:
        FormatError: An object is not one. AuthenticationError: an object was changed; also what
            else :meth:`BundleReader.read_chunk` raises.
    """
    yield from _headers(first, second)
    yield from _manifests(first.manifest, second.manifest)
    ours, theirs = first.header.layout, second.header.layout
    # Rows of another shape have no places in common.
    if (ours.layers, ours.encoding) == (theirs.layers, theirs.encoding):
        yield from _payloads(first, second)


def _headers(first: BundleReader, second: BundleReader) -> Iterator[FieldDifference]:
    ours, theirs = first.header, second.header
    if ours.epoch != theirs.epoch:
        yield FieldDifference("epoch", str(ours.epoch), str(theirs.epoch))
    try:
        # Asked apart from the layout, which has its own place below.
        aligned = dataclasses.replace(theirs.identity, layout=ours.layout)
        require_same_identity(ours.identity, aligned)
    except IdentityMismatchError as error:
        yield _of(error)
    try:
        require_same_layout(ours.layout, theirs.layout)
    except LayoutMismatchError as error:
        yield _of(error)


def _of(error: FieldError) -> FieldDifference:
    return FieldDifference(error.field, str(error.expected), str(error.found))


def _manifests(first: Manifest, second: Manifest) -> Iterator[FieldDifference]:
    yield from _numerics("", first.numerics, second.numerics)
    for field, ours, theirs in zip(_FIELDS, _fields(first), _fields(second), strict=True):
        if ours != theirs:
            yield FieldDifference(field, ours, theirs)
    yield from _schedule("", first.schedule, second.schedule)
    if first.draft is not None and second.draft is not None:
        yield from _numerics("draft.", first.draft.numerics, second.draft.numerics)
        yield from _schedule("draft.", first.draft.schedule, second.draft.schedule)


def _numerics(
    prefix: str, first: NumericsFingerprint, second: NumericsFingerprint
) -> Iterator[FieldDifference]:
    found = first.first_difference(second)
    if found is not None:
        name, ours, theirs = found
        yield FieldDifference(f"{prefix}numerics.{name}", ours, theirs)


def _schedule(prefix: str, first: CallSchedule, second: CallSchedule) -> Iterator[FieldDifference]:
    for index, (left, right) in enumerate(zip(first.runs, second.runs, strict=False)):
        if left != right:
            yield FieldDifference(f"{prefix}schedule[{index}]", _run(left), _run(right))
            return
    if len(first.runs) != len(second.runs):
        counts = (f"{len(schedule.runs)} runs" for schedule in (first, second))
        yield FieldDifference(f"{prefix}schedule", *counts)


def _run(run: CallRun) -> str:
    dropped = f", {run.dropped_tokens} dropped" if run.dropped_tokens else ""
    return f"{run.calls} × {run.call_tokens} tokens{dropped}"


_FIELDS = ("producer", "position", "window_rule", "components", "parent", "foreign_ring_heads")


def _fields(manifest: Manifest) -> tuple[str, ...]:
    parent = manifest.parent
    return (
        manifest.producer.value,
        str(manifest.position),
        manifest.window_rule.value,
        ", ".join(map(_component, manifest.components)),
        "none" if parent is None else f"{parent.manifest_id.hex()[:16]}… at {parent.position}",
        ", ".join(f"{ring.layer}: {ring.head}" for ring in manifest.foreign_ring_heads) or "none",
    )


def _component(component: Component) -> str:
    """A draft is named by its digest; the target's identity was compared field by field."""
    if component.kind is ComponentKind.TARGET:
        return str(component.kind.value)
    return f"{component.kind.value} {component.identity_digest.hex()[:16]}…"


def _payloads(first: BundleReader, second: BundleReader) -> Iterator[PayloadDifference]:
    """The first difference of token ids, of rows, and of every state that both have."""
    ours, theirs = _slots(first.manifest), _slots(second.manifest)
    comparable = _same_ids(first, second)
    same_draft = first.index.bindings.draft == second.index.bindings.draft
    found: set[str] = set()
    for slot in sorted(ours.keys() & theirs.keys(), key=_by_place):
        kind = "rows" if slot[1] in (ChunkClass.FULL, ChunkClass.SWA) else slot[1].value
        if slot[1] is ChunkClass.DRAFT and not same_draft:
            continue  # Rows of two models have no places in common.
        pair = ours[slot], theirs[slot]
        one, other = (
            reader.manifest.references[i] for reader, i in zip((first, second), pair, strict=True)
        )
        if kind in found or (comparable and one.content_id == other.content_id):
            continue
        opened = first.read_chunk(pair[0]), second.read_chunk(pair[1])
        difference = _first_in(first.index.bindings.require(one).layout, *opened)
        if difference is not None:
            found.add(kind)
            yield difference


def _same_ids(first: BundleReader, second: BundleReader) -> bool:
    """Whether equal content ids mean equal bytes: they are keyed over all of this."""
    one, other = first.index, second.index
    return (one.identity_digest, one.layout_digest, one.header.epoch) == (
        other.identity_digest,
        other.layout_digest,
        other.header.epoch,
    )


def _slots(manifest: Manifest) -> dict[_Slot, int]:
    return {_slot(reference): i for i, reference in enumerate(manifest.references)}


def _slot(reference: ChunkReference) -> _Slot:
    chunk_class = reference.chunk_class
    grid = limits.TOKEN_IDS_PER_CHUNK if chunk_class is ChunkClass.TOKEN_IDS else limits.GRID_TOKENS
    block = reference.first_position // grid * grid
    if not (reference.has_rows or chunk_class is ChunkClass.TOKEN_IDS or reference.layers):
        block = 0  # A state is compared with the state of the other pack, wherever that stands.
    return block, chunk_class, reference.layers, reference.part


def _by_place(slot: _Slot) -> tuple[int, str, tuple[int, ...], int]:
    return slot[0], slot[1].value, slot[2], slot[3]


def _first_in(
    layout: CacheLayout, one: OpenedChunk, other: OpenedChunk
) -> PayloadDifference | None:
    reference = one.reference
    if reference.has_rows or reference.has_draft_rows:
        return _first_row(layout, one, other)
    if reference.chunk_class is ChunkClass.TOKEN_IDS:
        start = max(reference.first_position, other.reference.first_position)
        row = _first_difference(_tail(one, start), _tail(other, start), TOKEN_ID_BYTES)
        return None if row is None else PayloadDifference(reference.chunk_class, start + row)
    if one.plaintext == other.plaintext:
        return None
    return PayloadDifference(reference.chunk_class, reference.first_position)


def _tail(chunk: OpenedChunk, start: int) -> memoryview:
    skipped = start - chunk.reference.first_position
    return memoryview(chunk.plaintext)[TOKEN_ID_BYTES * skipped :]


def _first_row(
    layout: CacheLayout, one: OpenedChunk, other: OpenedChunk
) -> PayloadDifference | None:
    """The smallest position that both hold and at which some layer differs."""
    start = max(one.reference.first_position, other.reference.first_position)
    found: list[tuple[int, int, str]] = []
    planes = zip(
        tile_of(layout, one).planes(layout), tile_of(layout, other).planes(layout), strict=True
    )
    for (layer, *ours), (_, *theirs) in planes:
        sizes = layout.key_row_bytes(layer), layout.value_row_bytes(layer)
        for role, size, left, right in zip(("key", "value"), sizes, ours, theirs, strict=True):
            row = _first_difference(
                left[size * (start - one.reference.first_position) :],
                right[size * (start - other.reference.first_position) :],
                size,
            )
            if row is not None:
                found.append((start + row, layer, role))
    if not found:
        return None
    position, layer, role = min(found)
    return PayloadDifference(one.reference.chunk_class, position, layer, role)


def _first_difference(left: memoryview, right: memoryview, row_bytes: int) -> int | None:
    """Number of the first row that differs, of those that both have."""
    rows = min(len(left), len(right)) // row_bytes
    if left[: rows * row_bytes] == right[: rows * row_bytes]:
        return None
    for row in range(rows):
        part = slice(row * row_bytes, (row + 1) * row_bytes)
        if left[part] != right[part]:
            return row
    return None
