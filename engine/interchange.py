"""Prompt caches of mlx-lm as packs, and back: what the ``kvpack.interchange`` entry point offers.

Bytes in, bytes out: the command reads and writes the files. The model folder is needed for what no
cache file says: whose rows these are, and in which shape they must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from engine.encodings import dtype_name
from engine.interchange_cache import (
    FORMAT,
    layer_numbers,
    layer_tensors,
    metadata_of,
    read_layers,
    require_layout,
)
from engine.interchange_file import HEADER_BYTES_MAX, PREFIX_BYTES, header_of, parse_tensor_file
from engine.interchange_rows import layer_buffers, tile_of_layers
from engine.mlxlm import load_model
from engine.model import Model
from kvpack.errors import LayoutMismatchError, LimitError
from kvpack.identity import Identity, NumericsFingerprint, require_same_layout
from kvpack.interchange import CacheMismatchError, ForeignCache
from kvpack.layout import CacheLayout, LayerKind, Producer
from kvpack.manifest import ForeignRingHead
from kvpack.snapshot import SessionCacheSnapshot

#: mlx-lm grows its buffers in steps of this many rows.
_STEP_ROWS: Final = 256

_NOT_RECORDED: Final = "not recorded"


class MlxLm:
    """Prompt caches of mlx-lm 0.32."""

    def open_model(self, folder: Path) -> MlxLmModel:
        """Load the model in ``folder``, on the calling thread.

        Raises:
            ModelFolderError: The folder cannot be used; also BackendError.
        """
        return MlxLmModel(load_model(folder))


class MlxLmModel:
    """One model, and the prompt caches that mlx-lm saved of it."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def file_bytes_max(self) -> int:
        """Header, numbers, and for each layer the context, or the window, and one growth step."""
        layout, total = self._model.layout, PREFIX_BYTES + HEADER_BYTES_MAX
        for layer, shape in enumerate(layout.layers):
            rows = max(layout.max_context_tokens, shape.window_tokens or 0) + _STEP_ROWS
            total += rows * layout.row_bytes(layer) + 4 * 4
        return total

    def identity(self, tenant: str) -> Identity:
        """Whose rows a file of this model holds."""
        return self._model.identity(tenant)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of ``text`` as ``mlx_lm.cache_prompt`` feeds it: as a message of the user."""
        return self._model.encode_user_message(text)

    def read(self, data: bytes | memoryview, token_ids: Sequence[int]) -> ForeignCache:
        """Check a whole file against the model and the ids; rows are copied out tile by tile.

        Raises:
            CacheFileError: It is damaged or contradicts itself.
            CacheFormatError: It is no prompt cache of mlx-lm 0.32, or holds a cache of a class
                that is not read.
            CacheMismatchError: It is of another model, or of another number of tokens.
            LimitError: A token id is outside the vocabulary, or the context is too short.
        """
        layout = self._model.layout
        layers = read_layers(parse_tensor_file(data))
        require_layout(layers, layout)
        position = layers[0].offset
        if position > layout.max_context_tokens:
            expected = f"at most {layout.max_context_tokens}, the model's context"
            raise LimitError("offset", expected, position)
        self._require_tokens(token_ids, position)
        return ForeignCache(
            producer=Producer.MLX_LM,
            token_ids=tuple(token_ids),
            numerics=_numerics(layout),
            ring_heads=tuple(
                ForeignRingHead(layer, layers[layer].head)
                for layer in layout.layers_of(LayerKind.SWA)
            ),
            read_tile=lambda spec: tile_of_layers(layers, layout, position, spec),
        )

    def write(
        self, snapshot: SessionCacheSnapshot, ring_heads: Sequence[ForeignRingHead], label: str
    ) -> Iterator[bytes]:
        """The bytes of a file that ``mlx_lm.models.cache.load_prompt_cache`` reads.

        Args:
            snapshot: The state, of this very model.
            ring_heads: From the manifest of a pack that came from mlx-lm; empty for our own.
            label: Path or name of the model, which ``mlx_lm.generate`` compares as text.

        Raises:
            LayoutMismatchError: It is of another layout, the oracle's, empty, or a ring's head is
                missing.
        """
        layout, position = self._model.layout, snapshot.position
        require_same_layout(layout, snapshot.layout)
        if snapshot.producer is Producer.ORACLE:
            raise LayoutMismatchError("producer", "any but oracle", snapshot.producer.value)
        if not position:
            raise LayoutMismatchError("position", "at least one token", position)
        return _pieces(snapshot, _heads(snapshot, ring_heads), label)

    def _require_tokens(self, token_ids: Sequence[int], position: int) -> None:
        if len(token_ids) != position:
            raise CacheMismatchError("token_ids", f"{position}, as the cache holds", len(token_ids))
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            limit = self._model.vocab_size - 1
            raise LimitError("token_ids", f"ids of 0 to {limit}", "an id outside")


def _numerics(layout: CacheLayout) -> NumericsFingerprint:
    """What the file says of how its rows were computed: nothing but the dtype.

    It differs from every fingerprint of our engine, so nobody can take one for the other.
    """
    names = ("backend", "device", "mlx", "mlx_lm", "os")
    known = {"dtype": dtype_name(layout.encoding), "file_format": FORMAT}
    return NumericsFingerprint(
        tuple(sorted({**dict.fromkeys(names, _NOT_RECORDED), **known}.items()))
    )


def _heads(snapshot: SessionCacheSnapshot, ring_heads: Sequence[ForeignRingHead]) -> dict[int, int]:
    """For every sliding-window layer the physical row at which its oldest row must lie."""
    layout, position = snapshot.layout, snapshot.position
    swa = layout.layers_of(LayerKind.SWA)
    if snapshot.producer is Producer.MLX_LM:
        heads = {ring.layer: ring.head for ring in ring_heads}
        for layer in swa:
            if layer not in heads:
                raise LayoutMismatchError(f"layers[{layer}].foreign_ring_head", "one", "none")
        return heads
    # Everybody else's rings begin where the position says: the oldest row's slot is its position.
    return {
        layer: layout.layers[layer].first_row(position) % _rows(layout, layer, position)
        for layer in swa
    }


def _rows(layout: CacheLayout, layer: int, position: int) -> int:
    return layout.layers[layer].held_rows(position)


def _pieces(snapshot: SessionCacheSnapshot, heads: dict[int, int], label: str) -> Iterator[bytes]:
    layout, position = snapshot.layout, snapshot.position
    tensors = [
        tensor
        for layer, shape in enumerate(layout.layers)
        for tensor in layer_tensors(layer, shape, layout.encoding, position)
    ]
    # mlx_lm.generate reads these two; cache_prompt writes them.
    user = {"model": label, "tokenizer_config": '{"trust_remote_code": false}'}
    yield header_of(tensors, metadata_of(layout, user))
    for layer, shape in enumerate(layout.layers):
        head = heads.get(layer, 0)
        yield from layer_buffers(layout, position, snapshot.tiles, layer, head)
        yield layer_numbers(shape, position, head)
