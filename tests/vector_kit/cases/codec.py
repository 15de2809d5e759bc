"""Section 5.3: frames that are sealed truthfully and are not what codec 2 allows."""

from __future__ import annotations

import zstandard

from tests.vector_kit.cases.shared import refused, with_state
from tests.vector_kit.chunks import frame
from tests.vector_kit.packs import Pack

_bad = refused("malformed chunk.6", released=3)
_PLAIN = b"planes of bytes " * 64


def _sealed(encoded: bytes, plain: bytes = _PLAIN) -> Pack:
    return with_state(plain=plain, codec=2, encoded=encoded)


def _with_dictionary() -> bytes:
    trained = zstandard.train_dictionary(
        1024, [f"sample {n} of planes {n * n}".encode() * 4 for n in range(400)], dict_id=7
    )
    return b"\x02" + zstandard.ZstdCompressor(dict_data=trained).compress(_PLAIN)


def _unstated() -> bytes:
    return frame(_PLAIN, content_size=False)


def _of_size(size: int) -> bytes:
    return b"\x02" + zstandard.ZstdCompressor().compress(bytes(size))


def _lying(size: int) -> bytes:
    """A frame that states the size of the plaintext and holds another."""
    stated = zstandard.ZstdCompressor().compress(bytes(1024))
    held = zstandard.ZstdCompressor().compress(bytes(size))
    header = zstandard.frame_header_size(stated)
    return b"\x02" + stated[:header] + held[zstandard.frame_header_size(held) :]


def _windowed(window: int, descriptor: int = 0x40) -> bytes:
    """A frame of 1,024 bytes that states its window, section 3.1.1.1 of RFC 8878."""
    found = zstandard.ZstdCompressor().compress(bytes(1024))
    blocks = found[zstandard.frame_header_size(found) :]
    stated = (1024 - 256).to_bytes(2, "little")
    return b"\x02" + found[:4] + bytes([descriptor, window]) + stated + blocks


VECTORS = [
    refused("ok")("codec-window-cap", "a window of 8 MiB", _sealed(_windowed(0x68), bytes(1024))),
    _bad("codec-window", "a window of 9 MiB", _sealed(_windowed(0x69), bytes(1024))),
    _bad("codec-unused-bit", "the unused bit", _sealed(_windowed(0x68, 0x50), bytes(1024))),
    _bad("codec-reserved-bit", "the reserved bit", _sealed(_windowed(0x68, 0x48), bytes(1024))),
    _bad("codec-short", "a frame of 8 bytes", _sealed(frame(_PLAIN)[:9])),
    _bad("codec-planes-0", "no planes", _sealed(b"\0" + frame(_PLAIN)[1:])),
    _bad("codec-planes-3", "three planes", _sealed(b"\x03" + frame(_PLAIN)[1:])),
    _bad("codec-planes-odd", "two planes of 1,023 bytes",
         _sealed(b"\x02" + zstandard.ZstdCompressor().compress(bytes(1023)), bytes(1023))),
    _bad("codec-cut", "a frame without its end", _sealed(frame(_PLAIN)[:-3])),
    _bad("codec-empty", "planes and no frame", _sealed(b"\x02")),
    _bad("codec-two-frames", "two frames", _sealed(frame(_PLAIN) + frame(_PLAIN)[1:])),
    _bad("codec-skippable", "a skippable frame after the frame",
         _sealed(frame(_PLAIN) + b"\x50\x2a\x4d\x18\0\0\0\0")),
    _bad("codec-skippable-first", "a skippable frame before the frame",
         _sealed(b"\x02\x50\x2a\x4d\x18\0\0\0\0" + frame(_PLAIN)[1:])),
    _bad("codec-left-over", "a byte after the frame", _sealed(frame(_PLAIN) + b"\0")),
    _bad("codec-checksum", "a frame with a checksum", _sealed(frame(_PLAIN, checksum=True))),
    _bad("codec-dictionary", "a frame with a dictionary id", _sealed(_with_dictionary())),
    _bad("codec-size-unstated", "a frame that does not state its size", _sealed(_unstated())),
    _bad("codec-size-larger", "a frame of more bytes", _sealed(_of_size(1026))),
    _bad("codec-size-smaller", "a frame of fewer bytes", _sealed(_of_size(1022))),
    _bad("codec-bomb", "a frame of 64 MiB", _sealed(_of_size(1 << 26), bytes(4096))),
    _bad("codec-lying-larger", "a frame that states 1,024 bytes and holds more",
         _sealed(_lying(1028))),
    _bad("codec-lying-smaller", "a frame that states 1,024 bytes and holds fewer",
         _sealed(_lying(1020))),
    _bad("codec-no-frame", "bytes that are no frame", _sealed(b"\x02" + b"no frame at all")),
    refused("not_authentic chunk.6", released=3)("codec-digest", "another encoded digest",
        with_state(plain=_PLAIN, codec=2, wrong_digest=True)),
    refused("malformed manifest.scan")(
        "codec-longer", "encoded bytes as long as the plaintext",
        with_state(plain=bytes(20), codec=2, encoded=b"\x02" + bytes(19))),
]  # fmt: skip
