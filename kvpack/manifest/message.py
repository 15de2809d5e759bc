"""The manifest as canonical protobuf bytes, and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Final

from kvpack import codes
from kvpack.chunk.reference import ChunkReference
from kvpack.errors import KvpackError
from kvpack.layout import CacheLayout
from kvpack.manifest.model import (
    Component,
    DistinctReferences,
    DraftModel,
    ForeignRingHead,
    Manifest,
    ParentReference,
)
from kvpack.manifest.tally import Tally
from kvpack.pb.v1 import manifest_pb2 as pb
from kvpack.wire import rules
from kvpack.wire.messages import (
    identity_message,
    identity_value,
    numerics_message,
    numerics_value,
    parse,
    schedule_message,
    schedule_value,
    serialize,
)


def encode_message(manifest: Manifest, known: KnownReferences | None = None) -> bytes:
    """The canonical bytes of ``manifest``.

    Args:
        manifest: The table.
        known: Its references, where they were encoded before: no field comes after theirs.

    Raises:
        ValueError: Those are others.
    """
    if known is not None and known.references != manifest.references:
        raise ValueError("known: other references than the manifest's")
    references = manifest.references if known is None else ()
    message = pb.Manifest(
        window_rule=codes.WINDOW_RULES.code(manifest.window_rule),
        producer=codes.PRODUCERS.code(manifest.producer),
        position=manifest.position,
        numerics=numerics_message(manifest.numerics),
        schedule=schedule_message(manifest.schedule),
        components=[_component_message(component) for component in manifest.components],
        foreign_ring_heads=[
            pb.ForeignRingHead(layer=ring.layer, head=ring.head)
            for ring in manifest.foreign_ring_heads
        ],
        references=[_reference_message(reference) for reference in references],
    )
    if manifest.parent is not None:
        message.parent.CopyFrom(_parent_message(manifest.parent))
    return serialize(message) + (b"" if known is None else known.encoded)


#: At most so many wait: encoding them at the end takes a millisecond.
_ENCODED_AT_ONCE: Final = 32


class KnownReferences:
    """References in order, encoded for a manifest's message as they come, not when they count.

    Whoever sends or takes a pack knows them one after the other; at its end everybody waits. Some
    are encoded at a time: after a chunk's rows went through the caches, the first of such calls
    takes several times as long as the second.

    Args:
        references: The first of them.
        layout: The shape of their rows. What the gate asks of each is then asked when it comes,
            too.

    """

    __slots__ = ("_encoded", "_layout", "_references", "_tally", "_tuple")

    def __init__(
        self, references: Iterable[ChunkReference] = (), layout: CacheLayout | None = None
    ) -> None:
        self._layout = layout
        self._references: list[ChunkReference] = []
        self._encoded: list[bytes] = []
        self._tuple: tuple[ChunkReference, ...] | None = None
        self._tally = None if layout is None else Tally(layout)
        for reference in references:
            self.append(reference)

    def __len__(self) -> int:
        return len(self._references)

    def append(self, reference: ChunkReference) -> None:
        """One more, at the end."""
        self._references.append(reference)
        self._tuple = None
        if len(self._references) - len(self._encoded) >= _ENCODED_AT_ONCE:
            self._catch_up()

    def _catch_up(self) -> None:
        for reference in self._references[len(self._encoded) :]:
            encoded = encode_reference(reference)
            if self._tally is not None:
                self._tally.add(reference)
            self._encoded.append(encoded)

    def truncate(self, count: int) -> None:
        """Forget all but the first ``count``."""
        if count >= len(self._references):
            return
        del self._references[count:]
        del self._encoded[count:]
        self._tuple = None
        if self._layout is not None:
            self._tally = Tally(self._layout)
            for reference in self._references[: len(self._encoded)]:
                self._tally.add(reference)

    @property
    def tally(self) -> Tally | None:
        """What the gate's questions came to; None without a layout."""
        self._catch_up()
        return self._tally

    @property
    def references(self) -> tuple[ChunkReference, ...]:
        """All of them; the same value until another one comes."""
        if self._tuple is None:
            distinct = self.tally is not None and self.tally.distinct
            self._tuple = (DistinctReferences if distinct else tuple)(self._references)
        return self._tuple

    @property
    def encoded(self) -> bytes:
        """:func:`encode_reference` of each, joined."""
        self._catch_up()
        return b"".join(self._encoded)


def encode_reference(reference: ChunkReference) -> bytes:
    """One entry of a message's list of references, its tag and length included."""
    return serialize(pb.Manifest(references=[_reference_message(reference)]))


def decode_message(data: bytes, known: KnownReferences | None = None) -> Manifest:
    """Read a manifest's message: scan, then parse, then build the value that checks itself.

    Args:
        data: The message.
        known: What its references should be. They are then compared as bytes and not read, which
            is most of the work; where they are others, everything is read as without.

    Raises:
        FormatError: The bytes are not canonical, or fields contradict each other.
        LimitError: A field is outside its cap.
    """
    manifest = None if known is None else _decode_around(data, known)
    return _decode_all(data) if manifest is None else manifest


def message_seal_ids(data: bytes) -> tuple[int, bytes]:
    """``(position, seal ids)`` of a message whose form alone is checked.

    Raises:
        FormatError: The bytes are not canonical. LimitError: A field is outside its cap.
    """
    message = parse(pb.Manifest(), rules.MANIFEST, data, "manifest")
    return message.position, b"".join([entry.seal_id for entry in message.references])


def _decode_around(data: bytes, known: KnownReferences) -> Manifest | None:
    """The manifest, if its references are the known ones; None where that cannot be told.

    They are the last field, so all but the first are cut off before the rest is read. What is left
    must encode to the very bytes that it was read from: then so does the whole.
    """
    references, encoded = known.references, known.encoded
    if not references or not data.endswith(encoded):
        return None
    rest = data[: len(data) - len(encoded)] + encode_reference(references[0])
    try:
        around = _decode_all(rest)
        if around.references != references[:1] or encode_message(around) != rest:
            return None
        return dataclasses.replace(around, references=references)
    except KvpackError:
        # Whatever is wrong is said by the one who reads everything.
        return None


def _decode_all(data: bytes) -> Manifest:
    message = parse(pb.Manifest(), rules.MANIFEST, data, "manifest")
    make = functools.partial(
        Manifest,
        producer=codes.PRODUCERS.member(message.producer, "manifest.producer"),
        position=message.position,
        numerics=numerics_value(message.numerics),
        schedule=schedule_value(message.schedule),
        references=tuple(_references(message)),
        components=tuple(_component_value(component) for component in message.components),
        parent=_parent_value(message.parent) if message.HasField("parent") else None,
        foreign_ring_heads=tuple(
            ForeignRingHead(ring.layer, ring.head) for ring in message.foreign_ring_heads
        ),
        window_rule=codes.WINDOW_RULES.member(message.window_rule, "manifest.window_rule"),
    )
    # The parsed tree is as large as the value: it goes before the value's own checks need memory.
    del message
    return make()


def _component_message(component: Component) -> pb.Component:
    kind = codes.COMPONENT_KINDS.code(component.kind)
    message = pb.Component(kind=kind, identity_digest=component.identity_digest)
    if component.draft is not None:
        message.draft.CopyFrom(
            pb.DraftModel(
                identity=identity_message(component.draft.identity),
                numerics=numerics_message(component.draft.numerics),
                schedule=schedule_message(component.draft.schedule),
            )
        )
    return message


def _component_value(message: pb.Component) -> Component:
    kind = codes.COMPONENT_KINDS.member(message.kind, "manifest.components.kind")
    draft = _draft_value(message.draft) if message.HasField("draft") else None
    return Component(kind, message.identity_digest, draft)


def _draft_value(message: pb.DraftModel) -> DraftModel:
    return DraftModel(
        identity=identity_value(message.identity),
        numerics=numerics_value(message.numerics),
        schedule=schedule_value(message.schedule),
    )


def _parent_message(parent: ParentReference) -> pb.ParentReference:
    return pb.ParentReference(
        manifest_id=parent.manifest_id,
        epoch=parent.epoch,
        position=parent.position,
        depth=parent.depth,
    )


def _parent_value(message: pb.ParentReference) -> ParentReference:
    return ParentReference(message.manifest_id, message.epoch, message.position, message.depth)


def _reference_message(reference: ChunkReference) -> pb.ChunkReference:
    return pb.ChunkReference(
        chunk_class=codes.CHUNK_CLASSES.code(reference.chunk_class),
        layers=reference.layers,
        first_position=reference.first_position,
        token_count=reference.token_count,
        part=reference.part,
        content_id=reference.content_id,
        seal_id=reference.seal_id,
        codec=codes.CODECS.code(reference.codec),
        aead=codes.AEADS.code(reference.aead),
        epoch=reference.epoch,
        plain_bytes=reference.plain_bytes,
        encoded_bytes=reference.encoded_bytes,
        first_used=reference.first_used,
        count_used=reference.count_used,
    )


def _references(message: pb.Manifest) -> list[ChunkReference]:
    # A pack has few layer groups and many chunks: equal lists are held once.
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    references = []
    for entry in message.references:
        layers = tuple(entry.layers)
        references.append(_reference_value(entry, groups.setdefault(layers, layers)))
    return references


def _reference_value(message: pb.ChunkReference, layers: tuple[int, ...]) -> ChunkReference:
    return ChunkReference(
        chunk_class=codes.CHUNK_CLASSES.member(message.chunk_class, "manifest.references.class"),
        layers=layers,
        first_position=message.first_position,
        token_count=message.token_count,
        content_id=message.content_id,
        seal_id=message.seal_id,
        codec=codes.CODECS.member(message.codec, "manifest.references.codec"),
        aead=codes.AEADS.member(message.aead, "manifest.references.aead"),
        epoch=message.epoch,
        plain_bytes=message.plain_bytes,
        encoded_bytes=message.encoded_bytes,
        part=message.part,
        first_used=message.first_used,
        count_used=message.count_used,
    )
