"""What the measurements run on: tiny models, and the reference geometry without a network."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

import engine
from engine import Generation, PlaneLayout
from engine.cache import PlaneCache
from engine.generation import empty_planes
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout

ROPE = RopeLayout(theta_bits=0x411E848000000000, dims=128, interleaved=False)


def token_ids(count: int) -> list[int]:
    """A fixed stream without a short period."""
    return [(i * i * 31 + i * 17 + 5) % 251 for i in range(count)]


@contextmanager
def tiny_folder(arch: str = "muse_glimmer", window: int = 64, layers: int = 8) -> Iterator[Path]:
    """Folder of a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        files = engine.tiny_model_files(arch, seed=7, window=window, layers=layers)
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        yield Path(folder)


def reference_layout(window: int = 2048, context: int = 131_072, layers: int = 52) -> CacheLayout:
    """52 layers, three of four with a window of 2,048, 1,024 bytes per layer and token."""
    sliding = LayerLayout(LayerKind.SWA, window, 2, 128, 128, ROPE)
    full = LayerLayout(LayerKind.FULL, None, 2, 128, 128)
    return CacheLayout((sliding, sliding, sliding, full) * (layers // 4), Encoding.F16LE, context)


@dataclass(frozen=True)
class NoNetwork:
    """Planes of a geometry, fed with made-up rows: rows are moved, never computed."""

    layout: CacheLayout
    plane_layout: PlaneLayout
    vocab_size: int = 256

    @property
    def window_tokens(self) -> int:
        """The smallest window of any layer."""
        return min(
            layer.window_tokens or self.layout.max_context_tokens for layer in self.layout.layers
        )

    def new_generation(self) -> Generation:
        return Generation(self, empty_planes(self))

    def forward(self, ids: mx.array, caches: Sequence[PlaneCache]) -> mx.array:
        count = ids.shape[1]
        for index, cache in enumerate(caches):
            shape = cache.plane.shape
            value = (ids[0].astype(mx.float16) + index)[None, None, :, None]
            rows = mx.broadcast_to(value, (1, shape.kv_heads, count, shape.key_dim))
            cache.update_and_fetch(rows, rows)
        return mx.zeros((1, count, self.vocab_size), mx.float16)
