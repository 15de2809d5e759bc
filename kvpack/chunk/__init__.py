"""Chunks: the sealed objects that packs, stores and wires are made of."""

from kvpack.chunk.header import ChunkHeader, parse_chunk, parse_header, parse_object
from kvpack.chunk.open import (
    OpenedChunk,
    check_content_id,
    open_chunk,
    open_parsed,
    open_tile,
    recompute_content_id,
    tile_of,
)
from kvpack.chunk.reference import OBJECT_BYTES_MAX, ChunkReference
from kvpack.chunk.rows import RowSealer
from kvpack.chunk.seal import (
    SealContext,
    SealedChunk,
    best_aead,
    seal_component,
    seal_draft_tile,
    seal_tile,
    seal_tile_framed,
    seal_token_ids,
)
from kvpack.codes import Aead, ChunkClass, Codec

__all__ = [
    "OBJECT_BYTES_MAX",
    "Aead",
    "ChunkClass",
    "ChunkHeader",
    "ChunkReference",
    "Codec",
    "OpenedChunk",
    "RowSealer",
    "SealContext",
    "SealedChunk",
    "best_aead",
    "check_content_id",
    "open_chunk",
    "open_parsed",
    "open_tile",
    "parse_chunk",
    "parse_header",
    "parse_object",
    "recompute_content_id",
    "seal_component",
    "seal_draft_tile",
    "seal_tile",
    "seal_tile_framed",
    "seal_token_ids",
    "tile_of",
]
