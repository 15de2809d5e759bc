"""The manifest: what a pack holds, in file order, and what it takes to continue from it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpack import limits
from kvpack.chunk.reference import ChunkReference, check_ids
from kvpack.codes import ComponentKind, WindowRule
from kvpack.errors import FormatError
from kvpack.identity import CallSchedule, Identity, NumericsFingerprint
from kvpack.layout import CacheLayout, Producer
from kvpack.wire import identity_digest


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What header and manifest say about the target, said about its draft model.

    Attributes:
        identity: Which model, in which shape.
        numerics: What decided the bits of its rows.
        schedule: In which calls they were computed.
    """

    identity: Identity
    numerics: NumericsFingerprint
    schedule: CallSchedule

    @property
    def layout(self) -> CacheLayout:
        """The shape of its rows."""
        return self.identity.layout


@dataclass(frozen=True, slots=True)
class Component:
    """One model's state in the pack.

    Attributes:
        kind: The target model, whose rows are FULL and SWA chunks, or its draft model, whose rows
            and state are DRAFT chunks.
        identity_digest: 32 bytes: whose state. The target's is the header's identity.
        draft: The draft model; None for the target, which the header describes.

    Raises:
        LimitError: The digest is not 32 bytes.
        FormatError: A target with a draft model, or a draft without.
    """

    kind: ComponentKind
    identity_digest: bytes
    draft: DraftModel | None = None

    def __post_init__(self) -> None:
        check_ids(component_identity_digest=self.identity_digest)
        if (self.draft is not None) != (self.kind is ComponentKind.DRAFT):
            words = {True: "a draft model", False: "no draft model"}
            expected = words[self.draft is None]
            raise FormatError("component.draft", f"{expected}: {self.kind.value}", "the other")

    @classmethod
    def of_draft(cls, draft: DraftModel) -> Component:
        """The component of ``draft``."""
        return cls(ComponentKind.DRAFT, identity_digest(draft.identity), draft)


@dataclass(frozen=True, slots=True)
class ParentReference:
    """The pack that a delta continues. Without it the delta is incomplete.

    Attributes:
        manifest_id: The parent's manifest MAC, 32 bytes.
        epoch: Epoch of the root under which that MAC was made.
        position: Tokens taken from the parent: the cut, on the grid.
        depth: Parents above this pack; 1 where the parent is whole.

    Raises:
        LimitError: A field is outside its cap.
        FormatError: The cut is not on the grid.
    """

    manifest_id: bytes
    epoch: int
    position: int
    depth: int

    def __post_init__(self) -> None:
        check_ids(parent_manifest_id=self.manifest_id)
        limits.check_range("parent.epoch", self.epoch, 1, limits.EPOCH_MAX)
        limits.check_range("parent.position", self.position, 1, limits.POSITION_MAX)
        limits.check_range("parent.depth", self.depth, 1, limits.PARENT_DEPTH_MAX)
        if self.position % limits.GRID_TOKENS:
            expected = f"a multiple of {limits.GRID_TOKENS}"
            raise FormatError("parent.position", expected, self.position)


@dataclass(frozen=True, slots=True)
class ForeignRingHead:
    """Where a foreign engine's ring of ``layer`` began: the physical row of its oldest row.

    Our own rings begin where their position says; this serves only an export back.

    Raises:
        LimitError: A field is outside its cap.
    """

    layer: int
    head: int

    def __post_init__(self) -> None:
        limits.check_range("ring_head.layer", self.layer, 0, limits.LAYER_INDEX_MAX)
        limits.check_range("ring_head.head", self.head, 0, limits.POSITION_MAX)


class DistinctReferences(tuple[ChunkReference, ...]):
    """References of which no two stand for one thing: whoever makes one has looked.

    Only :class:`kvpack.manifest.KnownReferences` does, which looks at each as it comes.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The table of contents of one pack. Holds no tokens, no text and no names.

    Attributes:
        producer: Who computed the rows.
        position: Tokens that the state stands for; also the next position to be computed.
        numerics: What decided the bits of the rows.
        schedule: In which calls they were computed.
        references: Every chunk of the pack, once, in file order.
        components: The target, then perhaps the draft.
        parent: The pack that this one continues, or None for a whole pack.
        foreign_ring_heads: For packs imported from mlx-lm, ascending by layer.
        window_rule: Which keys a query of a sliding window sees.

    Raises:
        LimitError: A field is outside its cap.
        FormatError: Components, ring heads or references are doubled or out of order.
    """

    producer: Producer
    position: int
    numerics: NumericsFingerprint
    schedule: CallSchedule
    references: tuple[ChunkReference, ...]
    components: tuple[Component, ...]
    parent: ParentReference | None = None
    foreign_ring_heads: tuple[ForeignRingHead, ...] = ()
    window_rule: WindowRule = WindowRule.SELF_AND_BEFORE

    def __post_init__(self) -> None:
        limits.check_range("manifest.position", self.position, 0, limits.POSITION_MAX)
        limits.check_range("manifest.references", len(self.references), 0, limits.REFERENCES_MAX)
        kinds = tuple(component.kind for component in self.components)
        if kinds not in ((ComponentKind.TARGET,), (ComponentKind.TARGET, ComponentKind.DRAFT)):
            found = ", ".join(kind.value for kind in kinds) or "none"
            raise FormatError("manifest.components", "target, or target and draft", found)
        layers = [ring.layer for ring in self.foreign_ring_heads]
        if layers != sorted(set(layers)):
            raise FormatError("manifest.foreign_ring_heads", "each layer once, ascending", layers)
        _check_unique(self.references)

    @property
    def cut(self) -> int:
        """First position that this pack itself holds: 0, or the parent's cut."""
        return 0 if self.parent is None else self.parent.position

    @property
    def draft(self) -> DraftModel | None:
        """The draft model whose rows the pack holds too, or None."""
        return self.components[-1].draft


def _check_unique(references: tuple[ChunkReference, ...]) -> None:
    """No two references may stand for one thing, nor for one object.

    Raises:
        FormatError: Names the second of the two.
    """
    if isinstance(references, DistinctReferences):
        return
    slots: set[object] = set()
    seal_ids: set[bytes] = set()
    for index, reference in enumerate(references):
        if reference.slot in slots or reference.seal_id in seal_ids:
            raise FormatError(f"manifest.references[{index}]", "each chunk once", "a second time")
        slots.add(reference.slot)
        seal_ids.add(reference.seal_id)
