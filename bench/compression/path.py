"""What compression does to a transfer, at the rates that links have.

    python bench/compression/path.py PACK

Seals and opens the chunks of a pack, raw and compressed, in processor time of one core, and puts
both through a pipeline of sender, link and receiver: the slowest of the three decides. gRPC's own
cost at each end is limits.md's (section 4).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from prefill import KEY

from kvpack.bundle import BundleReader
from kvpack.chunk import Codec, SealContext, open_chunk, seal_tile, tile_of
from kvpack.compression import Compression, choose_codec
from kvpack.keys import Keyring

GRPC_S_PER_GB = 0.2
RATES = [1, 2.5, 4, 5, 7, 9, 10, 25]
CHUNKS_MAX, ROUNDS = 24, 5


def costs(path: Path, wanted: Codec) -> tuple[float, float, float]:
    """``(seal, open, ratio)``: seconds per GB of plaintext at each end, and what shrinks."""
    with BundleReader.open(path, Keyring([KEY])) as reader:
        header, layout = reader.index.header, reader.index.header.layout
        context = SealContext(KEY, header.identity_digest, header.layout_digest)
        opened = [chunk for chunk in reader.chunks() if chunk.reference.has_rows][:CHUNKS_MAX]
    tiles = [tile_of(layout, chunk) for chunk in opened]
    width = layout.encoding.element_bytes
    plain = sum(len(tile.data) for tile in tiles)
    best_seal = best_open = float("inf")
    stored = 0
    for _ in range(ROUNDS):
        seal_s = open_s = stored = 0
        for tile in tiles:
            # One chunk at a time, as a stream has it: its memory is used again for the next one.
            started = time.process_time()
            chunk = seal_tile(context, tile, wanted, element_bytes=width)
            middle = time.process_time()
            open_chunk(context, chunk.object)
            open_s += time.process_time() - middle
            seal_s += middle - started
            stored += len(chunk.object)
        best_seal, best_open = min(best_seal, seal_s), min(best_open, open_s)
    return best_seal / plain * 1e9, best_open / plain * 1e9, plain / stored


def pipeline(rate_gbit: float, seal_s: float, open_s: float, ratio: float) -> float:
    """Seconds per GB of plaintext, once the pipeline is full."""
    link = 8 / rate_gbit / ratio
    return max(seal_s + GRPC_S_PER_GB / ratio, link, open_s + GRPC_S_PER_GB / ratio)


def main(path: str) -> None:
    raw, split = (costs(Path(path), wanted) for wanted in (Codec.RAW, Codec.ZSTD_SPLIT))
    for name, (seal_s, open_s, ratio) in (("raw", raw), ("zstd_split", split)):
        print(f"{name}: seal {seal_s:.2f} s/GB, open {open_s:.2f} s/GB, ratio {ratio:.3f}")
    print()
    print("| link | off, s/GB | on, s/GB | on / off | the rule |")
    print("| --- | ---: | ---: | ---: | --- |")
    for rate in RATES:
        off, on = pipeline(rate, *raw), pipeline(rate, *split)
        chosen = choose_codec(Compression.AUTO, int(rate * 1e9))
        rule = "off" if chosen is Codec.RAW else "on"
        print(f"| {rate} Gb/s | {off:.2f} | {on:.2f} | {on / off:.2f} | {rule} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
