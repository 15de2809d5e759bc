"""Every cap of ``limits.py``: a value at it is good, one above it is refused as over the limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pack_kit import CONTEXT, FULL, HEADER, IDENTITY, LAYOUT, NUMERICS, SWA

from kvpack import limits
from kvpack.bundle import Header, encode_header
from kvpack.bundle.footer import Footer
from kvpack.chunk import Aead, ChunkClass, ChunkReference, Codec, seal_component, seal_token_ids
from kvpack.codes import ComponentKind
from kvpack.errors import KeyFileError, KvpackError, LimitError
from kvpack.identity import CallRun, CallSchedule, NumericsFingerprint
from kvpack.keys import generate_key, load_key_file
from kvpack.layout import CacheLayout, Encoding, Producer
from kvpack.manifest import Component, Manifest, ParentReference
from kvpack.wire import rules
from kvpack.wire.scan import scan


def _reference(index: int = 0, **fields: object) -> ChunkReference:
    name = index.to_bytes(4, "little") + bytes(28)
    values = {
        "chunk_class": ChunkClass.FULL, "layers": (0,), "first_position": index, "token_count": 1,
        "content_id": name, "seal_id": name, "codec": Codec.RAW, "aead": Aead.AES_256_GCM,
        "epoch": 1, "plain_bytes": 4, "encoded_bytes": 4,
    }  # fmt: skip
    return ChunkReference(**{**values, **fields})


def _layers(count: int) -> CacheLayout:
    return CacheLayout((FULL,) * count, Encoding.F16LE, 16)


def _row(byte_count: int) -> CacheLayout:
    dims = byte_count // 2
    layer = replace(FULL, kv_heads=1, key_dim=dims // 2, value_dim=dims - dims // 2)
    return CacheLayout((layer,), Encoding.F16LE, 16)


def _identity_of_bytes(length: int) -> None:
    """Scan a message of exactly ``length`` bytes; what it holds is wrong at once."""
    scan(rules.IDENTITY, b"\x0a\x01a" + bytes(length - 3), "identity")


def _length(rule_bytes: int, check: Callable[[], object]) -> None:
    """Let the error about a length through, and none about what the bytes hold."""
    try:
        check()
    except KvpackError as error:
        if f"at most {rule_bytes} bytes" in str(error):
            raise


def _manifest(count: int) -> Manifest:
    target = Component(ComponentKind.TARGET, HEADER.identity_digest)
    references = tuple(_reference(index) for index in range(count))
    return Manifest(Producer.ENGINE, 0, NUMERICS, CallSchedule(), references, (target,))


def _names(count: int) -> NumericsFingerprint:
    return NumericsFingerprint(tuple((f"{index:04}", "v") for index in range(count)))


def _parent(depth: int) -> ParentReference:
    return ParentReference(bytes(32), 1, 256, depth)


def _state(data_bytes: int, part: int = 0) -> object:
    return seal_component(CONTEXT, ChunkClass.SESSION, 0, 0, bytes(data_bytes), part=part)


CAPS: dict[str, Callable[[int], object]] = {
    "CHUNK_PLAINTEXT_BYTES_MAX": _state,
    "ROW_BYTES_MAX": lambda cap: _row(cap + cap % 2),
    "LAYERS_MAX": _layers,
    "LAYER_INDEX_MAX": lambda index: _reference(layers=(0, index)),
    "KV_HEADS_MAX": lambda cap: replace(FULL, kv_heads=cap),
    "HEAD_DIM_MAX": lambda cap: replace(FULL, value_dim=cap),
    "POSITION_MAX": lambda cap: replace(SWA, window_tokens=cap),
    "TOKEN_ID_MAX": lambda cap: seal_token_ids(CONTEXT, [cap]),
    "TOKEN_IDS_PER_CHUNK": lambda cap: _reference(
        chunk_class=ChunkClass.TOKEN_IDS, layers=(), token_count=cap,
        plain_bytes=4 * cap, encoded_bytes=4 * cap),
    "NAME_BYTES_MAX": lambda cap: replace(IDENTITY, engine_abi="é" * (cap // 2) + "x" * (cap % 2)),
    "NAMED_VALUES_MAX": _names,
    "SCHEDULE_RUNS_MAX": lambda cap: CallSchedule((CallRun(1, 1),) * cap),
    "EPOCH_MAX": lambda cap: generate_key("a", cap),
    "IDENTITY_BYTES_MAX": lambda cap: _length(
        limits.IDENTITY_BYTES_MAX, lambda: _identity_of_bytes(cap)),
    "REFERENCES_MAX": _manifest,
    "MANIFEST_BYTES_MAX": lambda cap: _length(
        limits.MANIFEST_BYTES_MAX, lambda: scan(rules.MANIFEST, bytes(cap), "manifest")),
    "PART_MAX": lambda cap: _state(1, cap),
    "PARENT_DEPTH_MAX": _parent,
    "BUNDLE_BYTES_MAX": lambda cap: Footer(64, 1, cap, 64),
    "SPECULATIVE_BLOCK_TOKENS_MAX": lambda cap: CallRun(cap, 1, 1),
}  # fmt: skip

#: Not caps of a value, or caps whose error is another: see the tests below.
_OTHERS = {"GRID_TOKENS", "CHUNK_TARGET_BYTES", "KEY_FILE_BYTES_MAX"}


def test_every_cap_has_a_case() -> None:
    names = {name for name in vars(limits) if name.isupper()}
    assert names == set(CAPS) | _OTHERS


@pytest.mark.parametrize("name", CAPS)
def test_a_value_at_its_cap_is_good_and_one_above_is_over_the_limit(name: str) -> None:
    cap = getattr(limits, name)
    CAPS[name](cap)
    with pytest.raises(LimitError):
        CAPS[name](cap + 1)


def test_a_key_file_above_its_cap_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "k"
    for size, why in [(limits.KEY_FILE_BYTES_MAX, "not a kvpack"), (1025, "1025 bytes")]:
        path.write_bytes(os.urandom(size // 2).hex().encode().ljust(size, b"x"))
        path.chmod(0o600)
        with pytest.raises(KeyFileError, match=why):
            load_key_file(path)


def test_the_largest_identity_fits_its_cap() -> None:
    wide = replace(SWA, key_dim=4, value_dim=4)
    rope = replace(SWA.rope, scaling="s" * limits.NAME_BYTES_MAX, theta_bits=(1 << 64) - 1)
    layers = (replace(wide, window_tokens=limits.POSITION_MAX, rope=rope),) * limits.LAYERS_MAX
    layout = CacheLayout(layers, Encoding.F32LE, limits.POSITION_MAX)
    name = "n" * (limits.NAME_BYTES_MAX - 4)
    constants = [(f"{name}{index:04}", (1 << 64) - 1) for index in range(limits.NAMED_VALUES_MAX)]
    full = "x" * limits.NAME_BYTES_MAX
    identity = replace(
        IDENTITY, layout=layout, constants=tuple(constants), tenant=full, quantisation=full,
        engine_abi=full,
    )  # fmt: skip
    header = encode_header(Header.of(identity, limits.EPOCH_MAX))
    assert 200_000 < len(header) < limits.IDENTITY_BYTES_MAX
    assert LAYOUT.layers[0] == SWA
