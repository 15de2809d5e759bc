"""How much zstd level 1 over byte planes saves on real caches.

    python bench/compression/ratios.py PACK...

Packs come from ``prefill.py``. For each: keys and values apart, by kind of layer; the chunks as
they would be sealed, with how many are stored raw; and the classes that are never compressed, to
show what that costs. A table in Markdown.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from prefill import KEY

from kvpack.bundle import BundleReader
from kvpack.chunk import ChunkClass, Codec, SealContext, codec, seal_tile, tile_of
from kvpack.keys import Keyring
from kvpack.layout import CacheLayout, LayerLayout
from kvpack.snapshot import Tile


@dataclass
class Total:
    plain: int = 0
    encoded: int = 0
    chunks: int = 0
    raw: int = 0

    def add(self, plain: int, encoded: int | None) -> None:
        self.plain += plain
        self.encoded += plain if encoded is None else encoded
        self.chunks += 1
        self.raw += encoded is None

    def cells(self) -> list[str]:
        saved = 100 * (1 - self.encoded / self.plain)
        ratio = f"{self.plain / self.encoded:.3f}"
        return [f"{self.plain:,}", ratio, f"{saved:.1f} %", f"{self.raw} of {self.chunks}"]


def kind_of(shape: LayerLayout) -> str:
    return f"{shape.kind.value}, {'NoPE' if shape.rope is None else 'RoPE'}"


def totals(path: Path) -> tuple[str, dict[str, Total]]:
    """Name of the pack, and what each part of it saves."""
    found: dict[str, Total] = defaultdict(Total)
    with BundleReader.open(path, Keyring([KEY])) as reader:
        header, position = reader.index.header, reader.index.manifest.position
        layout, context = (
            header.layout,
            SealContext(KEY, header.identity_digest, header.layout_digest),
        )
        width = layout.encoding.element_bytes
        for opened in reader.chunks():
            reference, plain = opened.reference, opened.plaintext
            name = reference.chunk_class.value
            if not reference.has_rows:
                shorter = codec.compress(*aligned(reference.chunk_class, plain, width))
                size = None if shorter is None else len(shorter)
                found[f"{name} (always raw)"].add(len(plain), size)
                continue
            tile = tile_of(layout, opened)
            for part, rows in roles(layout, tile).items():
                shorter = codec.compress(rows, width)
                found[part].add(len(rows), None if shorter is None else len(shorter))
            sealed = seal_tile(context, tile, Codec.ZSTD_SPLIT, element_bytes=width).reference
            size = None if sealed.codec is Codec.RAW else sealed.encoded_bytes
            found[f"{name} chunks, as sealed"].add(sealed.plain_bytes, size)
    return f"{path.stem}, {position} tokens, {layout.encoding.value}", found


def roles(layout: CacheLayout, tile: Tile) -> dict[str, bytes]:
    """All keys of a tile and all its values, by kind of layer: pieces as large as half a chunk.

    Layer by layer they would look worse than they are: zstd has one table for each 128 KiB, and in
    a smaller frame the noisy plane shares it with the other.
    """
    parts: dict[str, list[memoryview]] = defaultdict(list)
    for layer, keys, values in tile.planes(layout):
        kind = kind_of(layout.layers[layer])
        parts[f"{kind}: keys"].append(keys)
        parts[f"{kind}: values"].append(values)
    return {part: b"".join(rows) for part, rows in parts.items()}


def aligned(kind: ChunkClass, plain: memoryview, width: int) -> tuple[memoryview, int]:
    """The payload without its version byte, and the width of its elements."""
    if kind is ChunkClass.TOKEN_IDS:
        return plain, 4
    return plain[1:], width


def main(paths: list[str]) -> None:
    print("| cache | part | plain bytes | ratio | saved | stored raw |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for path in paths:
        title, found = totals(Path(path))
        for part in sorted(found):
            print(f"| {title} | {' | '.join([part, *found[part].cells()])} |")
            title = ""


if __name__ == "__main__":
    main(sys.argv[1:])
