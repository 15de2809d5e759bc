"""Chunks: sealing is a function, and an object opens only as what it is."""

from __future__ import annotations

import hmac
import io
from dataclasses import replace

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_kit import CONTEXT, KEY, LAYOUT, rows

from kvpack import limits
from kvpack.chunk import (
    OBJECT_BYTES_MAX,
    Aead,
    ChunkClass,
    Codec,
    SealedChunk,
    codec,
    open_chunk,
    open_tile,
    parse_chunk,
    parse_header,
    recompute_content_id,
    seal_component,
    seal_tile,
    seal_tile_framed,
    seal_token_ids,
)
from kvpack.chunk.open import check_content_id
from kvpack.chunk.seal import _seal, _Slot
from kvpack.errors import (
    AuthenticationError,
    FormatError,
    IdentityMismatchError,
    KvpackError,
    LayoutMismatchError,
    LimitError,
    UnknownKeyError,
    VersionError,
)
from kvpack.keys import EpochKey
from kvpack.layout import LayerKind
from kvpack.snapshot import Tile, TileSpec

_SPEC = TileSpec(LayerKind.SWA, (0, 2), 260, 3)
_TILE = rows(_SPEC)


def _seal_tile() -> SealedChunk:
    return seal_tile(CONTEXT, _TILE)


@pytest.mark.parametrize("aead", list(Aead))
def test_a_framed_object_is_the_object_behind_its_frame_whatever_lay_in_the_buffer(aead):
    context, scratch = replace(CONTEXT, aead=aead), bytearray(b"\xff" * 40)
    for tile in (_TILE, rows(replace(_SPEC, token_count=1)), _TILE):
        sealed = seal_tile(context, tile)
        reference, framed = seal_tile_framed(context, tile, lambda n: b"%d:" % n, scratch)
        assert reference == sealed.reference
        assert framed == b"%d:" % len(sealed.object) + sealed.object
    with pytest.raises(LimitError):
        seal_tile_framed(context, Tile(_SPEC, b""), lambda n: b"", scratch)


def test_sealing_twice_gives_equal_bytes_from_any_buffer() -> None:
    first = _seal_tile()
    assert seal_tile(CONTEXT, _TILE).object == first.object
    for data in (memoryview(_TILE.data), memoryview(bytearray(_TILE.data))):
        assert seal_tile(CONTEXT, Tile(_SPEC, data)).object == first.object


def test_the_object_is_exactly_what_the_specification_says() -> None:
    """Rebuilt here from primitives: header, ids, chunk key, ciphertext."""

    def subkey(purpose: bytes, context: bytes = b"") -> bytes:
        salt = b"kvpack/v1\x04\x00acme\x01\x00\x00\x00"
        extracted = hmac.digest(salt, bytes(range(32)), "sha256")
        return hmac.digest(extracted, b"kvpack/v1/" + purpose + b"\0" + context + b"\x01", "sha256")

    def u32(*numbers: int) -> bytes:
        return b"".join(number.to_bytes(4, "little") for number in numbers)

    binding = CONTEXT.identity_digest + CONTEXT.layout_digest
    plain = bytes(_TILE.data)
    what = b"\x04\x00acme" + binding + bytes([2, 1, 0]) + b"\x02\x00\x00\x00\x02\x00"
    what += u32(260, 3, len(plain)) + plain
    content_id = blake3(what, key=subkey(b"content-id")).digest()
    how = content_id + bytes([1, 1]) + u32(1, len(plain), len(plain), 164) + b"\x00\x00"
    seal_id = blake3(how, key=subkey(b"seal-id")).digest()
    header = b"KVPC" + bytes([1, 2, 1, 1]) + u32(1, 260, 3, len(plain), len(plain))
    header += bytes([1, 0, 2, 0]) + binding + content_id + seal_id + b"\x00\x00\x02\x00"
    sealed = AESGCM(subkey(b"chunk", seal_id)).encrypt(bytes(12), plain, header)

    assert replace(CONTEXT, aead=Aead.AES_256_GCM) == CONTEXT
    assert _seal_tile().object == header + sealed


@pytest.mark.parametrize("aead", list(Aead))
@pytest.mark.parametrize("wanted", list(Codec))
def test_tiles_come_back(aead: Aead, wanted: Codec) -> None:
    context = replace(CONTEXT, aead=aead)
    spec = TileSpec(LayerKind.FULL, (1,), 0, 256)
    tile = Tile(spec, b"\x01\x3c" * (spec.data_bytes(LAYOUT) // 2))
    sealed = seal_tile(context, tile, wanted)
    assert (sealed.reference.codec, sealed.reference.aead) == (wanted, aead)
    assert parse_chunk(sealed.object) == sealed.reference
    for data in (sealed.object, memoryview(sealed.object), memoryview(bytearray(sealed.object))):
        back = open_tile(context, LAYOUT, data)
        assert (back.spec, bytes(back.data)) == (spec, tile.data)


def test_opened_plaintext_is_read_only_and_apart_from_its_input() -> None:
    data = bytearray(_seal_tile().object)
    opened = open_chunk(CONTEXT, data)
    data[:] = bytes(len(data))
    assert opened.plaintext.readonly
    assert bytes(opened.plaintext) == _TILE.data


def _contexts() -> dict[str, object]:
    return {
        "tenant": replace(CONTEXT, key=EpochKey("acmf", 1, bytes(range(32)))),
        "root": replace(CONTEXT, key=EpochKey("acme", 1, bytes(32))),
        "epoch": replace(CONTEXT, key=EpochKey("acme", 2, bytes(range(32)))),
        "model": replace(CONTEXT, identity_digest=bytes(32)),
        "layout": replace(CONTEXT, layout_digest=bytes(32)),
    }


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ("tenant", AuthenticationError),
        ("root", AuthenticationError),
        ("epoch", UnknownKeyError),
        ("model", IdentityMismatchError),
        ("layout", LayoutMismatchError),
    ],
)
def test_another_model_layout_tenant_or_epoch_never_opens(
    other: str, error: type[KvpackError]
) -> None:
    with pytest.raises(error):
        open_chunk(_contexts()[other], _seal_tile().object)


@pytest.mark.parametrize(
    ("offset", "field"),
    [(5, "class"), (12, "position"), (28, "roles"), (29, "part"), (162, "layer"), (32, "model")],
)
def test_an_object_that_claims_to_be_other_rows_never_opens(offset: int, field: str) -> None:
    good = _seal_tile().object
    for value in range(256):
        if value == good[offset]:
            continue
        with pytest.raises(KvpackError) as caught:
            open_chunk(CONTEXT, good[:offset] + bytes([value]) + good[offset + 1 :])
        assert isinstance(caught.value, AuthenticationError | FormatError), (field, value)


def test_other_rows_give_other_ids_even_where_the_bytes_are_equal() -> None:
    data = bytes(_SPEC.data_bytes(LAYOUT))
    specs = [
        _SPEC,
        TileSpec(LayerKind.SWA, (0, 2), 261, 3),
        TileSpec(LayerKind.SWA, (0,), 260, 6),
        TileSpec(LayerKind.SWA, (2,), 260, 6),
        TileSpec(LayerKind.FULL, (1,), 260, 6),
        TileSpec(LayerKind.SWA, (0, 1), 260, 3),
    ]
    chunks = [seal_tile(CONTEXT, Tile(spec, data)) for spec in specs]
    chunks += [seal_component(CONTEXT, ChunkClass.SESSION, 260, 0, data, part=p) for p in (0, 1)]
    chunks.append(seal_component(CONTEXT, ChunkClass.SAMPLER, 260, 0, data))
    assert len({chunk.reference.content_id for chunk in chunks}) == len(chunks)
    assert len({chunk.reference.seal_id for chunk in chunks}) == len(chunks)


def test_one_plaintext_at_two_levels_or_ciphers_has_one_content_id_and_two_keys() -> None:
    text = b"".join(bytes([i % 7, i % 11, i % 250, i % 3]) for i in range(20_000))
    slot = _Slot(ChunkClass.SESSION, (), 5, 0)
    chunks = [_seal(CONTEXT, slot, text, Codec.ZSTD_SPLIT, 2, level) for level in (1, 19)]
    chunks.append(_seal(CONTEXT, slot, text, Codec.RAW, 2))
    other = replace(CONTEXT, aead=Aead.CHACHA20_POLY1305)
    chunks.append(_seal(other, slot, text, Codec.RAW, 2))
    assert len({chunk.reference.content_id for chunk in chunks}) == 1
    assert len({chunk.reference.seal_id for chunk in chunks}) == 4
    assert len({KEY.subkey("chunk", chunk.reference.seal_id) for chunk in chunks}) == 4
    for chunk in chunks:
        assert bytes(open_chunk(CONTEXT, chunk.object).plaintext) == text


def test_noise_is_stored_raw() -> None:
    chunk = seal_tile(CONTEXT, _TILE, Codec.ZSTD_SPLIT)
    assert chunk.reference.codec is Codec.RAW


def test_the_content_id_is_recomputed_and_a_false_one_is_found() -> None:
    opened = open_chunk(CONTEXT, _seal_tile().object)
    assert recompute_content_id(CONTEXT, opened) == opened.reference.content_id
    false = replace(opened, reference=replace(opened.reference, content_id=bytes(32)))
    with pytest.raises(AuthenticationError, match=r"c\[1\].*content id"):
        check_content_id(CONTEXT, false, "c[1]")


def test_a_false_encoded_digest_of_a_key_holder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TileSpec(LayerKind.FULL, (1,), 0, 256)
    tile = Tile(spec, bytes(spec.data_bytes(LAYOUT)))
    monkeypatch.setattr("kvpack.chunk.seal.encoded_digest", lambda *_: bytes([7]) * 32)
    false = seal_tile(CONTEXT, tile, Codec.ZSTD_SPLIT)
    monkeypatch.undo()
    with pytest.raises(AuthenticationError, match="encoded digest"):
        open_chunk(CONTEXT, false.object)


def test_token_ids_are_four_bytes_each_in_ranges() -> None:
    count = limits.TOKEN_IDS_PER_CHUNK + 5
    chunks = seal_token_ids(CONTEXT, range(count))
    assert [chunk.reference.token_count for chunk in chunks] == [limits.TOKEN_IDS_PER_CHUNK, 5]
    assert bytes(open_chunk(CONTEXT, chunks[1].object).plaintext[:8]) == (
        limits.TOKEN_IDS_PER_CHUNK.to_bytes(4, "little")
        + (limits.TOKEN_IDS_PER_CHUNK + 1).to_bytes(4, "little")
    )
    assert seal_token_ids(CONTEXT, []) == []
    delta = seal_token_ids(CONTEXT, [1, 2], first_position=limits.TOKEN_IDS_PER_CHUNK - 1)
    assert [chunk.reference.first_position for chunk in delta] == [65_535, 65_536]
    for bad in (-1, limits.TOKEN_ID_MAX + 1):
        with pytest.raises(LimitError, match="token_ids"):
            seal_token_ids(CONTEXT, [0, bad])


@pytest.mark.parametrize(
    ("offset", "value", "error", "field"),
    [
        (0, b"KVPX", FormatError, "magic"),
        (4, b"\x02", VersionError, "version: expected 1, found 2"),
        (5, b"\x00", FormatError, "class: expected one of: 1 full, 2 swa"),
        (5, b"\x08", FormatError, "class.*found 8"),
        (6, b"\x03", FormatError, "codec: expected one of: 1 raw, 2 zstd_split"),
        (7, b"\x03", FormatError, "aead: expected one of: 1 aes_256_gcm"),
        (8, bytes(4), LimitError, "epoch"),
        (16, bytes(4), LimitError, "token_count"),
        (20, bytes(4), LimitError, "plain_bytes"),
        (24, b"\xff\xff\xff\x7f", FormatError, "encoded_bytes"),
        (28, b"\x02", FormatError, "role_order: expected keys_then_values, found opaque"),
        (28, b"\x03", FormatError, "role_order: expected one of"),
        (30, b"\x01\x02", LimitError, "layers: expected 0 to 512"),
        (160, b"\x02\x00\x00\x00", FormatError, "layers"),
    ],
)
def test_framing_names_the_field(
    offset: int, value: bytes, error: type[KvpackError], field: str
) -> None:
    good = _seal_tile().object
    with pytest.raises(error, match=field):
        parse_header(good[:offset] + value + good[offset + len(value) :])


@settings(max_examples=100)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_a_reference_or_an_error_of_ours(data: bytes, prefixed: bool) -> None:
    object_bytes = b"KVPC\x01" + data if prefixed else data
    for read in (parse_chunk, parse_header, lambda d: open_chunk(CONTEXT, d)):
        try:
            read(object_bytes)
        except KvpackError:
            continue
        assert read is parse_header


@pytest.mark.parametrize(
    ("chunk_class", "first", "count", "part", "field"),
    [
        (ChunkClass.FINAL_LOGITS, 4, 0, 0, "token_count"),
        (ChunkClass.FINAL_LOGITS, 4, 1, 1, "part"),
        (ChunkClass.SESSION, 4, 1, 0, "token_count"),
        (ChunkClass.SAMPLER, limits.POSITION_MAX + 1, 0, 0, "first_position"),
        (ChunkClass.SESSION, 4, 0, 255, "part"),
        (ChunkClass.TOKEN_IDS, 0, 2, 0, "plain_bytes"),
        (ChunkClass.FULL, 0, 1, 0, "layers"),
    ],
)
def test_a_class_allows_only_its_own_ranges(
    chunk_class: ChunkClass, first: int, count: int, part: int, field: str
) -> None:
    with pytest.raises(FormatError, match=field):
        seal_component(CONTEXT, chunk_class, first, count, b"x", part=part)


def test_the_plaintext_cap_has_a_chunk_at_it_and_none_above() -> None:
    biggest = seal_component(CONTEXT, ChunkClass.SESSION, 0, 0, bytes(4 << 20))
    assert len(open_chunk(CONTEXT, biggest.object).plaintext) == 4 << 20
    assert len(biggest.object) <= OBJECT_BYTES_MAX
    with pytest.raises(LimitError, match="plain_bytes"):
        seal_component(CONTEXT, ChunkClass.SESSION, 0, 0, bytes((4 << 20) + 1))
    with pytest.raises(LimitError, match="plain_bytes"):
        seal_component(CONTEXT, ChunkClass.SESSION, 0, 0, b"")


def _frame(planes: bytes, **options: bool) -> bytes:
    import zstandard

    return b"\x02" + zstandard.ZstdCompressor(level=1, **options).compress(planes)


def test_a_frame_must_be_one_whole_frame_of_the_declared_size() -> None:
    planes = bytes(1000)
    good = _frame(planes)
    assert codec.decompress(good, 1000) == planes
    bomb = _frame(bytes(64 << 20))
    for name, encoded, plain_bytes in [
        ("larger than declared", good, 998),
        ("smaller than declared", good, 1002),
        ("bytes after it", good + b"x", 1000),
        ("a second frame", good + good[1:], 1000),
        ("a bomb", bomb, 1000),
        ("no size in it", _frame(planes, write_content_size=False), 1000),
        ("no frame", b"\x02garbage-garbage", 1000),
        ("nothing", b"\x02", 1000),
        ("planes of 3", b"\x03" + good[1:], 999),
        ("odd size", good, 1001),
        *((f"cut by {cut}", good[:-cut], 1000) for cut in range(1, len(good) - 1)),
    ]:
        with pytest.raises(FormatError):
            codec.decompress(encoded, plain_bytes)
        assert name


@given(st.binary(min_size=4, max_size=400), st.sampled_from([2, 4]))
def test_the_codec_is_lossless(data: bytes, planes: int) -> None:
    whole = (data * 50)[: len(data) * 50 // planes * planes]
    encoded = codec.compress(whole, planes)
    if encoded is not None:
        assert len(encoded) <= len(whole) * 0.97
        assert codec.decompress(encoded, len(whole)) == whole


def test_repr_shows_no_payload() -> None:
    sealed = seal_component(CONTEXT, ChunkClass.SESSION, 0, 0, b"secret words")
    opened = open_chunk(CONTEXT, sealed.object)
    out = io.StringIO()
    print(sealed, opened, CONTEXT, KEY, file=out)
    assert "secret" not in out.getvalue()
