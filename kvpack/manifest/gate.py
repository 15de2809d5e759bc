"""The shape gate: does this manifest describe exactly one whole state under this header?

Pure, and asked on both sides: a writer never seals what a reader would refuse. The order of the
checks is the order of docs/spec/kvpack-v1.md, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpack import limits
from kvpack.chunk.reference import ChunkReference
from kvpack.codes import ChunkClass
from kvpack.errors import FormatError, IdentityMismatchError, LayoutMismatchError
from kvpack.header import Header
from kvpack.layout import CacheLayout, LayerKind, Producer
from kvpack.manifest.model import Component, DraftModel, Manifest
from kvpack.manifest.tally import Tally
from kvpack.snapshot import TileSpec, check_coverage, check_producer_encoding
from kvpack.wire import identity_digest

_STATES = (ChunkClass.SAMPLER, ChunkClass.SESSION)


def check_manifest(
    header: Header, manifest: Manifest, *, in_store: bool = False, tally: Tally | None = None
) -> None:
    """Refuse a manifest that is not the table of one whole state under ``header``.

    Args:
        header: Whose rows.
        manifest: The table.
        in_store: It lies in a store, where references may be trimmed. Nowhere else may they.
        tally: What the manifest's references came to, where each was looked at as it came. A
            matter of speed: where that is not enough, all are looked at.

    Raises:
        FormatError: A reference, component or schedule contradicts the rest.
        LimitError: The position is beyond the layout's context.
        IdentityMismatchError: The target component is another model than the header's.
        LayoutMismatchError: Rows or token ids are missing, doubled, or of another size.
    """
    draft = manifest.draft
    layouts = [header.layout] if draft is None else [header.layout, draft.layout]
    for layout in layouts:
        limits.check_range("manifest.position", manifest.position, 0, layout.max_context_tokens)
    for layout in layouts:
        check_producer_encoding(manifest.producer, layout.encoding)
    _check_components(header, manifest)
    _check_schedules(manifest)
    _check_ring_heads(header, manifest)
    _check_parent(manifest)
    if tally is not None and _is_told(header, manifest, tally):
        return
    specs: list[TileSpec] = []
    draft_specs: list[TileSpec] = []
    for index, reference in enumerate(manifest.references):
        field = f"manifest.references[{index}]"
        if reference.is_trimmed and not in_store:
            raise FormatError(f"{field}.count_used", "absent outside of stores", "present")
        if reference.epoch > header.epoch:
            raise FormatError(f"{field}.epoch", f"at most {header.epoch}", reference.epoch)
        if reference.has_rows:
            specs.append(_check_rows(header.layout, reference, field))
        elif reference.has_draft_rows and draft is not None:
            draft_specs.append(_check_rows(draft.layout, reference, field))
        else:
            _check_place(manifest, reference, field)
    _check_parts(manifest.references)
    _check_token_ids(manifest)
    check_coverage(header.layout, manifest.position, specs, manifest.cut)
    if draft is not None:
        _check_draft_coverage(draft.layout, manifest.position, draft_specs)


def _is_told(header: Header, manifest: Manifest, tally: Tally) -> bool:
    return (
        manifest.parent is None
        and manifest.draft is None
        and tally.layout == header.layout
        and tally.epoch <= header.epoch
        and tally.is_whole(manifest.position)
    )


def _check_draft_coverage(layout: CacheLayout, position: int, specs: list[TileSpec]) -> None:
    # In a delta too all rows are there: they are few, and the parent may have had another draft.
    try:
        check_coverage(layout, position, specs)
    except LayoutMismatchError as error:
        raise LayoutMismatchError(f"draft.{error.field}", error.expected, error.found) from None


def _check_components(header: Header, manifest: Manifest) -> None:
    found = manifest.components[0].identity_digest
    if found != header.identity_digest:
        raise IdentityMismatchError(
            "manifest.components[0].identity_digest",
            header.identity_digest.hex()[:16],
            found.hex()[:16],
        )
    if manifest.draft is not None:
        _check_draft(header, manifest.components[-1], manifest.draft)
    elif any(reference.chunk_class is ChunkClass.DRAFT for reference in manifest.references):
        raise FormatError("manifest.components", "a draft component", "no draft component")


def _check_draft(header: Header, component: Component, draft: DraftModel) -> None:
    """The draft is of the same tenant, and the session's token ids stand for its rows too."""
    field = "manifest.components[1]"
    digest = identity_digest(draft.identity)
    if component.identity_digest != digest:
        expected, found = digest.hex()[:16], component.identity_digest.hex()[:16]
        raise FormatError(f"{field}.identity_digest", expected, found)
    if draft.identity.tenant != header.tenant:
        raise FormatError(f"{field}.draft.identity.tenant", header.tenant, draft.identity.tenant)
    ours, theirs = header.identity.tokenizer_digest, draft.identity.tokenizer_digest
    if ours != theirs:
        name = f"{field}.draft.identity.tokenizer_digest"
        raise IdentityMismatchError(name, ours.hex()[:16], theirs.hex()[:16])


def _check_schedules(manifest: Manifest) -> None:
    schedules = {"manifest.schedule": manifest.schedule}
    if manifest.draft is not None:
        schedules["manifest.components[1].draft.schedule"] = manifest.draft.schedule
    for field, schedule in schedules.items():
        computed = schedule.position
        if computed != manifest.position and (computed or manifest.producer is Producer.ENGINE):
            raise FormatError(field, f"calls of {manifest.position} tokens", computed)


def _check_ring_heads(header: Header, manifest: Manifest) -> None:
    if manifest.foreign_ring_heads and manifest.producer is not Producer.MLX_LM:
        expected = f"none for producer {manifest.producer.value}"
        raise FormatError("manifest.foreign_ring_heads", expected, "some")
    for ring in manifest.foreign_ring_heads:
        field = f"manifest.foreign_ring_heads[layer {ring.layer}]"
        layers = header.layout.layers
        if ring.layer >= len(layers) or layers[ring.layer].kind is not LayerKind.SWA:
            raise LayoutMismatchError(field, "a sliding-window layer", "another")
        rows = layers[ring.layer].held_rows(manifest.position)
        if ring.head >= max(1, rows):
            raise LayoutMismatchError(field, f"below {max(1, rows)} rows", ring.head)


def _check_parent(manifest: Manifest) -> None:
    if manifest.parent is not None and manifest.parent.position >= manifest.position:
        raise FormatError("parent.position", f"below {manifest.position}", manifest.parent.position)


def _check_rows(layout: CacheLayout, reference: ChunkReference, field: str) -> TileSpec:
    """The rows that count of a chunk of rows, which must have the size of the shape."""
    spec = reference.rows_of(layout)
    expected = spec.data_bytes(layout)
    if reference.plain_bytes != expected:
        raise LayoutMismatchError(f"{field}.plain_bytes", expected, reference.plain_bytes)
    return reference.used_spec() if reference.is_trimmed else spec


def _check_place(manifest: Manifest, reference: ChunkReference, field: str) -> None:
    """Logits stand on the last row below the cut, states at the cut."""
    if reference.chunk_class is ChunkClass.FINAL_LOGITS:
        expected = manifest.position - 1
    elif reference.chunk_class in _STATES or not reference.token_count:
        expected = manifest.position
    else:
        return
    if reference.first_position != expected:
        raise FormatError(f"{field}.first_position", expected, reference.first_position)


def _check_parts(references: Sequence[ChunkReference]) -> None:
    """Pieces of one payload stand in order: 0, 1, 2, …"""
    following: dict[object, int] = {}
    for index, reference in enumerate(references):
        if not reference.may_have_parts:
            # Its part is 0, and nothing of its slot came before: both were checked when made.
            continue
        payload = reference.slot[:-1]
        expected = following.get(payload, 0)
        if reference.part != expected:
            raise FormatError(f"manifest.references[{index}].part", expected, reference.part)
        following[payload] = expected + 1


def _check_token_ids(manifest: Manifest) -> None:
    reached = manifest.cut
    for index, reference in enumerate(manifest.references):
        if reference.chunk_class is not ChunkClass.TOKEN_IDS:
            continue
        if reference.first_position != reached:
            field = f"manifest.references[{index}].first_position"
            raise LayoutMismatchError(field, reached, reference.first_position)
        reached += reference.token_count
    if reached != manifest.position:
        raise LayoutMismatchError("manifest.token_ids", manifest.position, reached)
