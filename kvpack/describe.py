"""What a pack says about itself, as plain values for people and programs. No tokens, no text.

``describe`` is about a pack that was verified; :func:`inspect_bundle` looks without a key, and what
it returns says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from kvpack.bundle.footer import Footer
from kvpack.bundle.index import check_totals, split_tail
from kvpack.bundle.reader import FileSource, open_regular, read_prefix, read_tail
from kvpack.chunk import ChunkReference
from kvpack.codes import ChunkClass
from kvpack.header import Header, decode_header
from kvpack.layout import CacheLayout, LayerLayout
from kvpack.manifest import Manifest, manifest_id, read_unverified


@dataclass(frozen=True, slots=True)
class ClassTotal:
    """All chunks of one class in one pack.

    Attributes:
        chunk_class: Which.
        chunks: How many.
        plain_bytes: Their plaintext.
        stored_bytes: Their objects, headers and tags included.
    """

    chunk_class: ChunkClass
    chunks: int
    plain_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class LayerTotal:
    """Neighbouring or scattered layers of one shape.

    Attributes:
        layer: The shape.
        count: How many layers have it.
    """

    layer: LayerLayout
    count: int


@dataclass(frozen=True, slots=True)
class Description:
    """One pack.

    Attributes:
        header: Whose rows.
        manifest: What it holds.
        manifest_id: 32 bytes: how a delta would name it.
        footer: Lengths.
        verified: Whether a key was used. Where False, every other attribute is a claim.
    """

    header: Header
    manifest: Manifest
    manifest_id: bytes
    footer: Footer
    verified: bool

    @property
    def classes(self) -> tuple[ClassTotal, ...]:
        """Totals by chunk class, in the order of their codes; only those that occur."""
        return class_totals(self.manifest.references)

    @property
    def layers(self) -> tuple[LayerTotal, ...]:
        """Totals by layer shape, in order of first appearance."""
        return layer_totals(self.header.layout)


def class_totals(references: Iterable[ChunkReference]) -> tuple[ClassTotal, ...]:
    """Totals by chunk class, in the order of their codes; only those that occur."""
    sums: dict[ChunkClass, list[int]] = {}
    for reference in references:
        total = sums.setdefault(reference.chunk_class, [0, 0, 0])
        total[0] += 1
        total[1] += reference.plain_bytes
        total[2] += reference.object_bytes
    return tuple(ClassTotal(name, *sums[name]) for name in ChunkClass if name in sums)


def layer_totals(layout: CacheLayout) -> tuple[LayerTotal, ...]:
    """Totals by layer shape, in order of first appearance."""
    counts: dict[LayerLayout, int] = {}
    for layer in layout.layers:
        counts[layer] = counts.get(layer, 0) + 1
    return tuple(LayerTotal(layer, count) for layer, count in counts.items())


def inspect_bundle(path: str | os.PathLike[str]) -> Description:
    """Look at header, manifest and footer without a key. Reads no chunk and proves nothing.

    Raises:
        FormatError: Not a bundle; also VersionError, LimitError.
        OSError: The file cannot be opened.
    """
    with open_regular(path) as file:
        source = FileSource(file)
        prefix = read_prefix(source)
        tail = read_tail(source)
        header_bytes = source.read(0, prefix.header_bytes)
    parts = split_tail(tail, source.file_bytes, prefix.header_bytes)
    manifest = read_unverified(parts.manifest_blob)
    check_totals(parts.footer, manifest)
    return Description(
        header=decode_header(header_bytes),
        manifest=manifest,
        manifest_id=manifest_id(parts.manifest_blob),
        footer=parts.footer,
        verified=False,
    )
