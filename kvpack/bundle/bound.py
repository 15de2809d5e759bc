"""Whether every chunk that went by is of the pack's models, asked after the manifest is known.

Which models those are stands at the end of a bundle. Until then a few headers are enough: the first
one of the target's chunks, the first that is bound to another model or layout than that one, and
the same of the draft's. If any chunk is of a foreign model, the first such is among them.
"""

from __future__ import annotations

from kvpack.chunk import ChunkClass, ChunkHeader


class BoundHeaders:
    """Headers in file order; remembers at most four."""

    def __init__(self) -> None:
        self._kept: dict[bool, list[tuple[int, ChunkHeader]]] = {False: [], True: []}

    def add(self, number: int, header: ChunkHeader) -> None:
        """The next header. ``number`` is its place in file order."""
        kept = self._kept[header.reference.chunk_class is ChunkClass.DRAFT]
        if not kept or (len(kept) == 1 and _binding(header) != _binding(kept[0][1])):
            kept.append((number, header))

    def by_number(self) -> dict[int, ChunkHeader]:
        """Those that have to be asked, by their place."""
        return dict(sorted(self._kept[False] + self._kept[True], key=lambda pair: pair[0]))


def _binding(header: ChunkHeader) -> tuple[bytes, bytes]:
    return header.identity_digest, header.layout_digest
