"""The codec against a hostile holder of the key: every frame here lies under a valid tag.

One rule for all: exactly one plain zstd frame, whole, that states the size the header states and
gives exactly that many bytes. Whatever else it is, every way of reading refuses it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from pack_kit import (
    CONTEXT,
    HEADER,
    KEY,
    KEYRING,
    LAYOUT,
    NUMERICS,
    Verdict,
    forward,
    opened,
    random_access,
    schedule,
    snapshot,
)  # fmt: skip

from kvpack.bundle import BundleReader, BundleWriter, Depth, encode_header
from kvpack.chunk import Codec, SealedChunk, codec, open_chunk, seal_tile, seal_token_ids
from kvpack.chunk.seal import NONCE, _header, _Slot, cipher
from kvpack.codes import ChunkClass, ComponentKind
from kvpack.errors import EXIT_MALFORMED, AuthenticationError, FormatError, LimitError
from kvpack.manifest import Component, Manifest, seal_manifest
from kvpack.snapshot import Tile, TileSpec, cut_tile_specs

POSITION = 200
SPEC = next(spec for spec in cut_tile_specs(LAYOUT, POSITION) if spec.layers == (1,))
SIZE = SPEC.data_bytes(LAYOUT)
#: Halves near 1.0 and their neighbours: the high bytes repeat, the low ones do not.
ROWS = b"".join(struct.pack("<H", 0x3C00 + (i * i * 31 + i * 7) % 256) for i in range(SIZE // 2))


def compressor(**options: bool) -> zstandard.ZstdCompressor:
    chosen = {"write_checksum": False, "write_dict_id": False, **options}
    return zstandard.ZstdCompressor(level=1, **chosen)


def planes(rows: bytes = ROWS) -> bytes:
    return rows[0::2] + rows[1::2]


def plain_frame(data: bytes = planes(), **options: bool) -> bytes:
    return compressor(**options).compress(data)


FRAME = plain_frame()


def stated(frame: bytes, size: int) -> bytes:
    """``frame``, whose content size takes two bytes, with another one in eight bytes."""
    assert frame[4] >> 6 == 1 and frame[4] & 0x20
    return frame[:4] + bytes([0xE0]) + struct.pack("<Q", size) + frame[7:]


def hostile(encoded: bytes, spec: TileSpec = SPEC, rows: bytes = ROWS) -> SealedChunk:
    """A chunk that says it holds ``rows``, over whatever ``encoded`` is, all tags valid."""
    slot = _Slot(ChunkClass.FULL, spec.layers, spec.first_position, spec.token_count)
    header = _header(CONTEXT, slot, rows, Codec.ZSTD_SPLIT, encoded)
    associated = header.encode()
    sealed = cipher(KEY, header.reference).encrypt(NONCE, encoded, associated)
    return SealedChunk(header.reference, associated + sealed)


def pack_with(replaced: dict[TileSpec, SealedChunk]) -> bytes:
    """A whole pack in which some tiles are other objects than honest ones."""
    sink, header_bytes = io.BytesIO(), encode_header(HEADER)
    state = snapshot(POSITION)
    writer = BundleWriter(sink, KEY, header_bytes)
    for tile in state.tiles:
        writer.add(replaced.get(tile.spec) or seal_tile(CONTEXT, tile))
    for chunk in seal_token_ids(CONTEXT, state.token_ids):
        writer.add(chunk)
    manifest = Manifest(
        state.producer, POSITION, NUMERICS, schedule(POSITION), writer.references,
        (Component(ComponentKind.TARGET, HEADER.identity_digest),),
    )  # fmt: skip
    writer.finish(seal_manifest(KEY, header_bytes, manifest))
    return sink.getvalue()


def verdicts(data: bytes, depth: Depth = Depth.FULL) -> list[Verdict]:
    return [random_access(data, depth=depth), forward(data, depth=depth), opened(data)]


SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
#: Not a single segment: the window is stated, 2 GiB, and the content size in four bytes.
WIDE = FRAME[:4] + bytes([0x80, 0xA8]) + struct.pack("<I", SIZE) + FRAME[7:]

HOSTILE = {
    "last byte cut": FRAME[:-1],
    "last 4 bytes cut": FRAME[:-4],
    "last 8 bytes cut": FRAME[:-8],
    "garbage appended": FRAME + b"garbage",
    "one zero appended": FRAME + b"\0",
    "second frame appended": FRAME + FRAME,
    "empty frame appended": FRAME + plain_frame(b""),
    "empty frame before": plain_frame(b"") + FRAME,
    "skippable frame appended": FRAME + SKIPPABLE,
    "skippable frame before": SKIPPABLE + FRAME,
    "64 GiB declared": stated(FRAME, 64 << 30),
    "2^63 declared": stated(FRAME, 1 << 63),
    "2^64 - 1 declared": stated(FRAME, (1 << 64) - 1),
    "two bytes more in it": stated(plain_frame(planes() + b"ab"), SIZE),
    "two bytes fewer in it": stated(plain_frame(planes()[:-2]), SIZE),
    "a million bytes in it": stated(plain_frame(bytes(1000) + bytes(59_000)), SIZE),
    "larger, and it says so": plain_frame(planes() + b"ab"),
    "smaller, and it says so": plain_frame(planes()[:-2]),
    "nothing in it": plain_frame(b""),
    "nothing at all": b"",
    "only the magic": FRAME[:4],
    "no content size": plain_frame(write_content_size=False),
    "a checksum": plain_frame(write_checksum=True),
    "a dictionary": FRAME[:4] + bytes([FRAME[4] | 1, 9]) + FRAME[5:],
    "a reserved bit": FRAME[:4] + bytes([FRAME[4] | 8]) + FRAME[5:],
    "an unused bit": FRAME[:4] + bytes([FRAME[4] | 16]) + FRAME[5:],
    "a window of 2 GiB": WIDE,
    "raw rows": ROWS[:-2],
}  # fmt: skip


def test_the_honest_frame_is_accepted_everywhere() -> None:
    """What every case below is a change of."""
    chunk = hostile(b"\x02" + FRAME)
    assert bytes(open_chunk(CONTEXT, chunk.object).plaintext) == ROWS
    assert seal_tile(CONTEXT, Tile(SPEC, ROWS), Codec.ZSTD_SPLIT) == chunk
    assert [v.reason for v in verdicts(pack_with({SPEC: chunk}), Depth.DEEP)] == [""] * 3
    restated = hostile(b"\x02" + stated(FRAME, SIZE))
    assert bytes(open_chunk(CONTEXT, restated.object).plaintext) == ROWS


@pytest.mark.parametrize("name", HOSTILE)
def test_a_frame_of_a_hostile_key_holder_is_refused_on_every_path(name: str) -> None:
    chunk = hostile(b"\x02" + HOSTILE[name])
    with pytest.raises(FormatError, match=r"chunk\.frame"):
        open_chunk(CONTEXT, chunk.object)
    assert [v.exit_code for v in verdicts(pack_with({SPEC: chunk}))] == [EXIT_MALFORMED] * 3


def test_the_window_cap_has_a_frame_at_it_and_one_above() -> None:
    at_it, above = (WIDE[:5] + bytes([window]) + WIDE[6:] for window in (0x68, 0x69))
    assert bytes(codec.decompress(b"\x02" + at_it, SIZE)) == ROWS
    with pytest.raises(LimitError, match=f"frame_window: expected 1 to {8 << 20} bytes"):
        codec.decompress(b"\x02" + above, SIZE)


def test_the_largest_chunk_comes_back() -> None:
    """Its frame is longer than zstd's window at level 1, so its header is of the other kind."""
    data = bytes(range(64)) * ((4 << 20) // 64)
    encoded = codec.compress(data, 2)
    assert encoded is not None and not encoded[5] & 0x20
    assert codec.decompress(encoded, len(data)) == data


@pytest.mark.parametrize("count", [0, 1, 3, 5, 255])
def test_another_number_of_planes_is_refused(count: int) -> None:
    chunk = hostile(bytes([count]) + FRAME)
    with pytest.raises(FormatError, match="plane_count"):
        open_chunk(CONTEXT, chunk.object)


def test_a_section_without_a_byte_cannot_be_written() -> None:
    with pytest.raises(LimitError, match="encoded_bytes: expected 1 to"):
        hostile(b"")
    with pytest.raises(FormatError, match="plane_count"):
        codec.decompress(b"", SIZE)


def test_a_section_as_long_as_its_rows_cannot_be_written() -> None:
    """What does not shrink is raw, so no encoded chunk is larger than the chunk it stands for."""
    with pytest.raises(LimitError, match="encoded_bytes"):
        hostile(b"\x02" + bytes(SIZE - 1))


def test_nothing_is_expanded_before_the_declared_size_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def expand(**_: object) -> None:
        raise AssertionError("a decompressor was made")

    monkeypatch.setattr(zstandard, "ZstdDecompressor", expand)
    for name in ("64 GiB declared", "2^63 declared", "larger, and it says so", "no content size"):
        with pytest.raises(FormatError, match="frame_content_size"):
            codec.decompress(b"\x02" + HOSTILE[name], SIZE)


def test_swapped_frames_are_refused() -> None:
    """Without the key by the tag; with it by the size, or by the content id where sizes agree."""
    turned = ROWS[1:] + ROWS[:1]
    honest, other = hostile(b"\x02" + FRAME), hostile(b"\x02" + FRAME, rows=turned)
    with pytest.raises(AuthenticationError):
        start = honest.reference.header_bytes
        open_chunk(CONTEXT, honest.object[:start] + other.object[start:])
    short = TileSpec(SPEC.kind, SPEC.layers, 0, 100)
    with pytest.raises(FormatError, match="frame_content_size"):
        open_chunk(
            CONTEXT, hostile(b"\x02" + FRAME, short, ROWS[: short.data_bytes(LAYOUT)]).object
        )
    others = b"\x02" + plain_frame(planes(turned))
    swapped = pack_with({SPEC: hostile(others)})
    assert random_access(swapped, depth=Depth.DEEP).reason == "not_authentic"
    assert forward(swapped, depth=Depth.DEEP).reason == "not_authentic"


def test_a_shape_lie_is_refused_before_a_chunk_is_read() -> None:
    """The expansion limit is the gated shape's: the manifest of a larger chunk never opens."""
    rows = bytes(SIZE + 1000)
    bomb = hostile(b"\x02" + plain_frame(rows), rows=rows)
    with pytest.raises(Exception, match="plain_bytes") as caught:
        pack_with({SPEC: bomb})
    assert caught.value.reason == "layout_mismatch"


@pytest.mark.parametrize("plane_count", [2, 4])
@pytest.mark.parametrize("size", [0, 4, 8, 252, 4096])
def test_planes_are_split_and_joined_alike_with_and_without_numpy(
    plane_count: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(np.random.default_rng(size).integers(0, 256, size, np.uint8))
    expected = b"".join(data[start::plane_count] for start in range(plane_count))
    for numpy in (np, None):
        monkeypatch.setattr(codec, "_numpy", lambda numpy=numpy: numpy)
        assert bytes(codec.split_planes(data, plane_count)) == expected
        assert bytes(codec.split_planes(memoryview(data), plane_count)) == expected
        joined = codec.join_planes(expected, plane_count)
        assert joined.readonly and joined.format == "B"
        assert bytes(joined) == data


def test_packs_are_equal_with_and_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(SPEC, ROWS)
    chunks = []
    for numpy in (np, None):
        monkeypatch.setattr(codec, "_numpy", lambda numpy=numpy: numpy)
        chunks.append(seal_tile(CONTEXT, tile, Codec.ZSTD_SPLIT))
        assert bytes(open_chunk(CONTEXT, chunks[-1].object).plaintext) == ROWS
    assert chunks[0] == chunks[1]


@pytest.mark.parametrize(("low_bits", "is_raw"), [(0, False), (7, False), (8, False), (16, True)])
def test_a_chunk_that_saves_less_than_3_percent_is_stored_raw(low_bits: int, is_raw: bool) -> None:
    noise = np.random.default_rng(7).integers(0, 1 << low_bits, SIZE // 2, np.uint32)
    rows = noise.astype("<u2").tobytes()
    chunk = seal_tile(CONTEXT, Tile(SPEC, rows), Codec.ZSTD_SPLIT)
    assert (chunk.reference.codec is Codec.RAW) == is_raw
    if not is_raw:
        assert chunk.reference.encoded_bytes <= 0.97 * chunk.reference.plain_bytes


def _at_the_rule(saved_bytes: int) -> Callable[[object], bytes]:
    class Fixed:
        def __init__(self, **_: object) -> None: ...

        def compress(self, data: bytes) -> bytes:
            return bytes(len(data) - saved_bytes - 1)

    return Fixed


def test_the_rule_has_a_chunk_at_it_and_one_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstandard, "ZstdCompressor", _at_the_rule(30))
    assert len(codec.compress(bytes(1000), 2) or b"") == 970
    monkeypatch.setattr(zstandard, "ZstdCompressor", _at_the_rule(29))
    assert codec.compress(bytes(1000), 2) is None


def test_a_compressed_pack_holds_what_a_raw_one_holds() -> None:
    honest = {SPEC: Tile(SPEC, ROWS)}
    packs = [
        pack_with({spec: seal_tile(CONTEXT, tile, wanted) for spec, tile in honest.items()})
        for wanted in Codec
    ]
    assert len(packs[1]) < len(packs[0])
    names = [
        {opened.reference.slot: opened.reference.content_id for opened in reader.chunks()}
        for reader in (BundleReader(io.BytesIO(data), KEYRING) for data in packs)
    ]
    assert names[0] == names[1]
