"""A pack of any size in the reference geometry, written without ever being in memory whole."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvpack.bundle import BundleReader, Header, publish_new, write_snapshot
from kvpack.bundle.writer import Sink
from kvpack.chunk import Codec
from kvpack.identity import CallRun, CallSchedule, Identity, NumericsFingerprint
from kvpack.keys import EpochKey, Keyring
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, Producer, RopeLayout
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs

KEY = EpochKey("bench", 1, bytes(range(32)))
KEYRING = Keyring([KEY])
SIGNER = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
PUBLIC = SIGNER.public_key().public_bytes_raw()

_WINDOW = 2048
_ROPE = RopeLayout(theta_bits=0x411E848000000000, dims=128, interleaved=False)
_SWA = LayerLayout(LayerKind.SWA, _WINDOW, 2, 128, 128, _ROPE)
_FULL = LayerLayout(LayerKind.FULL, None, 2, 128, 128)
#: 52 layers, three of four with a window, 1,024 bytes per layer and token.
LAYOUT = CacheLayout((_SWA, _SWA, _SWA, _FULL) * 13, Encoding.F16LE, 1 << 20)
IDENTITY = Identity(
    tenant=KEY.tenant,
    weights_digest=bytes([1]) * 32,
    quantisation="none",
    adapter_digest=bytes(32),
    tokenizer_digest=bytes([2]) * 32,
    chat_template_digest=bytes(32),
    engine_abi="bench/1",
    layout=LAYOUT,
    constants=(),
)
HEADER = Header.of(IDENTITY, KEY.epoch)
NUMERICS = NumericsFingerprint((("backend", "none"),))

_NOISE_BYTES = 8 << 20
_ALL_LAYERS_ROW = 52 * 1024
_FULL_LAYERS_ROW = 13 * 1024


def position_of(pack_bytes: int) -> int:
    """Tokens whose state takes about ``pack_bytes``, in whole blocks of 256."""
    windows = _ALL_LAYERS_ROW * _WINDOW
    if pack_bytes <= windows:
        tokens = pack_bytes // _ALL_LAYERS_ROW
    else:
        tokens = _WINDOW + (pack_bytes - windows) // _FULL_LAYERS_ROW
    return max(256, tokens // 256 * 256)


def state_of(position: int, *, compressible: bool = False) -> SessionCacheSnapshot:
    """A whole state whose rows all lie in one small buffer of noise, so that it takes no memory.

    Args:
        position: After how many tokens.
        compressible: Whether the high bytes take few values, as those of a cache do.
    """
    noise = random.Random(1).randbytes(_NOISE_BYTES)
    if compressible:
        words = bytearray(noise)
        words[1::2] = bytes(byte & 15 for byte in noise[1::2])
        noise = bytes(words)
    view = memoryview(noise)
    tiles = [
        Tile(spec, _part(view, number, spec))
        for number, spec in enumerate(cut_tile_specs(LAYOUT, position))
    ]
    token_ids = tuple(number % 1000 for number in range(position))
    return SessionCacheSnapshot(LAYOUT, Producer.ENGINE, position, token_ids, tuple(tiles))


def _part(noise: memoryview, number: int, spec: TileSpec) -> memoryview:
    length = spec.data_bytes(LAYOUT)
    start = number * 8192 % (len(noise) - length)
    return noise[start : start + length]


def write_pack(
    sink: Sink,
    state: SessionCacheSnapshot,
    *,
    codec: Codec = Codec.RAW,
    signer: Ed25519PrivateKey | None = None,
) -> None:
    """Seal and write a pack: rows, token ids, manifest, footer."""
    schedule = CallSchedule((CallRun(state.position, 1),))
    write_snapshot(sink, KEY, HEADER, state, NUMERICS, schedule, codec=codec, signer=signer)


def make_pack(path: Path, mib: int, codec: Codec = Codec.RAW) -> Path:
    """A signed pack of about ``mib`` MiB at ``path``."""
    state = state_of(position_of(mib << 20), compressible=codec is not Codec.RAW)
    with publish_new(path) as sink:
        write_pack(sink, state, codec=codec, signer=SIGNER)
    return path


@dataclass(frozen=True)
class Placed:
    """Where one chunk object lies in the file, and how it is opened."""

    offset: int
    header_bytes: int
    object_bytes: int
    chunk_key: bytes


def placed_chunks(path: Path) -> list[Placed]:
    """Every chunk of the pack, with its own key: what a bare decryption needs."""
    with BundleReader.open(path, KEYRING) as reader:
        offset, found = reader.index.footer.header_bytes, []
        for reference in reader.manifest.references:
            key = KEY.subkey("chunk", reference.seal_id)
            found.append(Placed(offset, reference.header_bytes, reference.object_bytes, key))
            offset += reference.object_bytes
    return found
