"""Cache files of mlx-lm on their way through a pack."""

from __future__ import annotations

import io
from collections.abc import Sequence

from engine.interchange import MlxLmModel
from kvpack.bundle import BundleReader, Header, read_snapshot
from kvpack.interchange import write_foreign_cache
from kvpack.keys import EpochKey, Keyring

KEY = EpochKey("acme", 1, bytes(range(32)))
KEYRING = Keyring([KEY])


def to_pack(model: MlxLmModel, data: bytes, token_ids: Sequence[int]) -> bytes:
    """An mlx-lm file as a pack."""
    sink = io.BytesIO()
    header = Header.of(model.identity(KEY.tenant), KEY.epoch)
    write_foreign_cache(sink, KEY, header, model.read(data, token_ids))
    return sink.getvalue()


def from_pack(model: MlxLmModel, pack: bytes) -> bytes:
    """The mlx-lm file that a pack gives."""
    reader = BundleReader(io.BytesIO(pack), KEYRING)
    heads = reader.index.manifest.foreign_ring_heads
    return b"".join(model.write(read_snapshot(reader), heads, "here"))
