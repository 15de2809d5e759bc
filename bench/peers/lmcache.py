"""LMCache's AES-GCM serializer, in memory, and its file system connector, on pieces of 256 tokens.

Its wheel asks for CUDA and for older versions of what others need here; without them, and with the
few packages that these two import, both run on a processor alone.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.peers import Variant

_AT_REST = "encryption and authentication at rest, bound to no model, layer or position"
VARIANTS = {
    "aesgcm": Variant("LMCache AES-GCM serializer, there and back, in memory", _AT_REST),
}
FILE_VARIANTS = {
    "fs": Variant("LMCache file system connector and fsync, and back", "nothing"),
}

#: Keys and values of 52 layers and 256 tokens: ``[2, 52, 256, 256]`` halves.
_SHAPE = (2, 52, 256, 256)
_PIECE_BYTES = 2 * 2 * 52 * 256 * 256
_FRAME_BYTES = 64


def load() -> None:
    import lmcache.v1.distributed.serde.aesgcm
    import lmcache.v1.storage_backend.connector.fs_connector  # noqa: F401


def store(payload: Any, folder: Path, variant: str) -> tuple[dict[str, float], Any]:
    back = np.ones_like(payload)
    pieces = range(0, len(payload), _PIECE_BYTES)
    ends = [min(start + _PIECE_BYTES, len(payload)) for start in pieces]
    spans = list(zip(pieces, ends, strict=True))
    if variant == "aesgcm":
        return _serialized(payload, back, spans), back
    return asyncio.run(_stored(payload, back, spans, folder / "lmcache")), back


def _object(array: Any) -> Any:
    """One of LMCache's memory objects over ``array``, which it does not own."""
    import torch
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    tensor = torch.from_numpy(array)
    shape = torch.Size([len(array)])
    metadata = MemoryObjMetadata(
        shape, torch.uint8, 0, len(array), 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape],
        dtypes=[torch.uint8],
    )  # fmt: skip
    return TensorMemoryObj(tensor, metadata, None)


def _serialized(payload: Any, back: Any, spans: list[tuple[int, int]]) -> dict[str, float]:
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.serde.aesgcm import AesGcmDeserializer, AesGcmSerializer
    from lmcache.v1.distributed.serde.key_provider import HkdfKeyProvider

    keys = HkdfKeyProvider(bytes(32), key_len=32, info_prefix=b"bench")
    key = ObjectKey(bytes(32), "bench", 0)
    frame = np.ones(_PIECE_BYTES + _FRAME_BYTES, np.uint8)
    sealing, opening = AesGcmSerializer(keys), AesGcmDeserializer(keys)
    seconds = {"seal_s": 0.0, "open_s": 0.0}
    for start, end in spans:
        source, target = _object(payload[start:end]), _object(back[start:end])
        sealed = _object(frame)
        begun = time.perf_counter()
        sealing.serialize(source, sealed, key)
        between = time.perf_counter()
        opening.deserialize(sealed, target, key)
        seconds["seal_s"] += between - begun
        seconds["open_s"] += time.perf_counter() - between
    return seconds


async def _stored(
    payload: Any, back: Any, spans: list[tuple[int, int]], folder: Path
) -> dict[str, float]:
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

    free = iter(spans)

    def allocate(*_: Any) -> Any:
        start, end = next(free)
        return _object(back[start:end])

    metadata = SimpleNamespace(
        get_shapes=lambda: [torch.Size(_SHAPE)], get_dtypes=lambda: [torch.float16], use_mla=False,
        chunk_size=_SHAPE[2], get_num_groups=lambda: 1,
    )  # fmt: skip
    config = SimpleNamespace(extra_config=None, use_layerwise=False)
    config.get_extra_config_value = lambda name, default: default
    memory = SimpleNamespace(config=config, metadata=metadata, allocate=allocate)
    loop = asyncio.get_running_loop()
    connector = FSConnector(loop, memory, config, base_paths_str=str(folder))
    keys = [CacheEngineKey("bench", 1, 0, number, torch.uint8) for number in range(len(spans))]
    begun = time.perf_counter()
    for key, (start, end) in zip(keys, spans, strict=True):
        await connector.put(key, _object(payload[start:end]))
    # It does not: what else stands here is on the disk.
    os.sync()
    between = time.perf_counter()
    for key in keys:
        if await connector.get(key) is None:
            raise OSError("a piece was not there")
    return {"write_s": between - begun, "read_s": time.perf_counter() - between}
