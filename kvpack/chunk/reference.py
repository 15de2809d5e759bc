"""What a manifest says about one chunk, and what a chunk's own header says about itself."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.codes import Aead, ChunkClass, Codec, RoleOrder
from kvpack.errors import FormatError, LayoutMismatchError, LimitError
from kvpack.layout import CacheLayout, LayerKind
from kvpack.snapshot import TileSpec

ID_BYTES: Final = 32
TAG_BYTES: Final = 16
TOKEN_ID_BYTES: Final = 4

#: Bytes of a chunk header before its layer list.
HEADER_FIXED_BYTES: Final = 160

#: A header with the longest layer list and an encoded digest.
HEADER_BYTES_MAX: Final = HEADER_FIXED_BYTES + 2 * limits.LAYERS_MAX + ID_BYTES

#: The largest object: what a transport must let through as one message.
OBJECT_BYTES_MAX: Final = HEADER_BYTES_MAX + limits.CHUNK_PLAINTEXT_BYTES_MAX + TAG_BYTES

PLAIN_BYTES_MAX: Final = limits.CHUNK_PLAINTEXT_BYTES_MAX

# By identity, and not in a dictionary: hashing a member runs Python code, some ten times a chunk.
_FULL: Final = ChunkClass.FULL
_SWA: Final = ChunkClass.SWA
_RAW: Final = Codec.RAW
_PAYLOADS: Final = (ChunkClass.DRAFT, ChunkClass.SAMPLER, ChunkClass.SESSION)


@dataclass(frozen=True, slots=True)
class ChunkReference:
    """One sealed chunk: what it holds, and which bytes are exactly it.

    Attributes:
        chunk_class: What the plaintext is.
        layers: FULL and SWA: the layers whose rows it holds, ascending. DRAFT: layers of the draft
            model whose rows it holds, or none for a state. Other classes: none.
        first_position: Absolute position of the first row or token. For a state *at* a position
            (SAMPLER, SESSION), that position.
        token_count: Rows per layer or tokens; 0 for a state at a position.
        content_id: 32 bytes, keyed, over what it holds.
        seal_id: 32 bytes, keyed, over how it was sealed.
        codec: How plaintext became encoded bytes.
        aead: Which cipher.
        epoch: Whose root sealed it. Ids compare within one epoch only.
        plain_bytes: Length of the plaintext.
        encoded_bytes: Length of what was encrypted: the ciphertext without its tag.
        part: Which piece, where one payload needs several chunks (SAMPLER, SESSION, draft state).
        first_used: In stores only: how many of a whole SWA block's first rows do not count.
        count_used: In stores only: how many rows count after those; 0 where all of them do.

    Raises:
        LimitError: A field is outside its cap.
        FormatError: Fields contradict each other or the class, a range crosses a grid edge, or
            layers do not ascend.
    """

    chunk_class: ChunkClass
    layers: tuple[int, ...]
    first_position: int
    token_count: int
    content_id: bytes
    seal_id: bytes
    codec: Codec
    aead: Aead
    epoch: int
    plain_bytes: int
    encoded_bytes: int
    part: int = 0
    first_used: int = 0
    count_used: int = 0

    def __post_init__(self) -> None:
        if len(self.content_id) != ID_BYTES or len(self.seal_id) != ID_BYTES:
            check_ids(content_id=self.content_id, seal_id=self.seal_id)
        limits.check_range("chunk.epoch", self.epoch, 1, limits.EPOCH_MAX)
        limits.check_range("chunk.plain_bytes", self.plain_bytes, 1, PLAIN_BYTES_MAX, "bytes")
        if self.codec is _RAW:
            if self.encoded_bytes != self.plain_bytes:
                raise FormatError("chunk.encoded_bytes", self.plain_bytes, self.encoded_bytes)
        else:
            # What does not shrink is stored raw, so a decoder never expands into nothing gained.
            high = self.plain_bytes - 1
            limits.check_range("chunk.encoded_bytes", self.encoded_bytes, 1, high, "bytes")
        try:
            self._check_range()
        except LayoutMismatchError as error:
            # Only parsed so far: not "another layout", which would mean that it is authentic.
            raise FormatError(error.field, error.expected, error.found) from error

    def _check_range(self) -> None:
        limits.check_range("chunk.part", self.part, 0, limits.PART_MAX)
        limits.check_range("chunk.layers", len(self.layers), 0, limits.LAYERS_MAX)
        if self.layers:
            limits.check_range("chunk.layers.max", max(self.layers), 0, limits.LAYER_INDEX_MAX)
        limits.check_range("chunk.first_position", self.first_position, 0, limits.POSITION_MAX)
        if self.has_rows:
            self.tile_spec()
        elif self.chunk_class is ChunkClass.DRAFT:
            self._check_draft()
        else:
            self._check_without_layers()
        if self.part and not self.may_have_parts:
            what = "rows" if self.layers else self.chunk_class.value
            raise FormatError("chunk.part", f"0 for {what}", self.part)
        if self.first_used or self.count_used:
            self._check_trim()

    def _check_trim(self) -> None:
        # Only a window begins inside a block; rows of other classes are used as they were sealed.
        if self.chunk_class is not ChunkClass.SWA or self.token_count != limits.GRID_TOKENS:
            raise FormatError("chunk.count_used", "absent, except for whole swa blocks", "present")
        limits.check_range("chunk.first_used", self.first_used, 0, limits.GRID_TOKENS - 1)
        room = min(limits.GRID_TOKENS - self.first_used, limits.GRID_TOKENS - 1)
        limits.check_range("chunk.count_used", self.count_used, 1, room, "rows")

    def _check_draft(self) -> None:
        if self.token_count and self.layers:
            TileSpec(LayerKind.FULL, self.layers, self.first_position, self.token_count)
        elif self.token_count or self.layers:
            raise FormatError("chunk.layers", "layers and rows, or neither", self.layers)

    def _check_without_layers(self) -> None:
        if self.layers:
            raise FormatError("chunk.layers", f"none for {self.chunk_class.value}", self.layers)
        if self.chunk_class is ChunkClass.TOKEN_IDS:
            self._check_token_ids()
            return
        count = 1 if self.chunk_class is ChunkClass.FINAL_LOGITS else 0
        if self.token_count != count:
            expected = f"{count} for {self.chunk_class.value}"
            raise FormatError("chunk.token_count", expected, self.token_count)

    def _check_token_ids(self) -> None:
        offset = self.first_position % limits.TOKEN_IDS_PER_CHUNK
        room = limits.TOKEN_IDS_PER_CHUNK - offset
        limits.check_range("chunk.token_count", self.token_count, 1, room, "token ids")
        if self.plain_bytes != TOKEN_ID_BYTES * self.token_count:
            expected = TOKEN_ID_BYTES * self.token_count
            raise FormatError("chunk.plain_bytes", expected, self.plain_bytes)

    @property
    def may_have_parts(self) -> bool:
        """Whether it is a piece of a payload, which may need several chunks. Rows are none."""
        return self.chunk_class in _PAYLOADS and not self.layers

    @property
    def has_rows(self) -> bool:
        """Whether the plaintext is K/V rows of the target model."""
        return self.chunk_class is _FULL or self.chunk_class is _SWA

    @property
    def has_draft_rows(self) -> bool:
        """Whether the plaintext is K/V rows of the draft model."""
        return self.chunk_class is ChunkClass.DRAFT and bool(self.layers)

    @property
    def role_order(self) -> RoleOrder:
        """Which order of keys and values the class implies: only rows have layers."""
        return RoleOrder.KEYS_THEN_VALUES if self.layers else RoleOrder.OPAQUE

    @property
    def header_bytes(self) -> int:
        """Length of the chunk header in bytes."""
        digest_bytes = 0 if self.codec is _RAW else ID_BYTES
        return HEADER_FIXED_BYTES + 2 * len(self.layers) + digest_bytes

    @property
    def object_bytes(self) -> int:
        """Length of the whole object: header, ciphertext and tag."""
        return self.header_bytes + self.encoded_bytes + TAG_BYTES

    @property
    def raw_object_bytes(self) -> int:
        """Bytes that the object of this plaintext takes at most, whatever codec seals it."""
        raw = HEADER_FIXED_BYTES + 2 * len(self.layers) + self.plain_bytes + TAG_BYTES
        return max(raw + ID_BYTES, self.object_bytes)

    @property
    def slot(self) -> tuple[ChunkClass, tuple[int, ...], int, int, int]:
        """What it holds, apart from the bytes: two chunks of one pack never share a slot."""
        return self.chunk_class, self.layers, self.first_position, self.token_count, self.part

    @property
    def is_trimmed(self) -> bool:
        """Whether only some of the chunk's rows count. Such a reference exists only in stores."""
        return self.count_used != 0

    def untrimmed(self) -> ChunkReference:
        """The reference as the object's own header says it."""
        return dataclasses.replace(self, first_used=0, count_used=0) if self.is_trimmed else self

    def used_spec(self) -> TileSpec:
        """Which rows of a FULL or SWA chunk count: all, or those a trimmed reference leaves.

        Raises:
            FormatError: The class holds no rows. And everything that :meth:`tile_spec` raises.
        """
        whole = self.tile_spec()
        if not self.is_trimmed:
            return whole
        first = whole.first_position + self.first_used
        return TileSpec(whole.kind, whole.layers, first, self.count_used)

    def tile_spec(self) -> TileSpec:
        """Which rows of the target a FULL or SWA chunk holds.

        Raises:
            FormatError: The class holds no rows of the target.
        """
        if self.chunk_class is _FULL:
            return _full_spec(self.layers, self.first_position, self.token_count)
        if self.chunk_class is _SWA:
            return _swa_spec(self.layers, self.first_position, self.token_count)
        raise FormatError("chunk.class", "full or swa", self.chunk_class.value)

    def rows_of(self, layout: CacheLayout) -> TileSpec:
        """Which rows it holds of the model with ``layout``: the target's, or the draft's for DRAFT.

        Raises:
            FormatError: The class holds no rows.
            LayoutMismatchError: Its first layer is not in ``layout``.
        """
        if self.chunk_class is not ChunkClass.DRAFT or not self.layers:
            return self.tile_spec()
        first = self.layers[0]
        if first >= len(layout.layers):
            raise LayoutMismatchError("tile.layers", f"< {len(layout.layers)}", first)
        of_kind = _full_spec if layout.layers[first].kind is LayerKind.FULL else _swa_spec
        return of_kind(self.layers, self.first_position, self.token_count)


#: Reference, gate and reader ask for one and the same: of a large pack a thousand times each.
_SPECS_KEPT: Final = 4096


@functools.lru_cache(maxsize=_SPECS_KEPT)
def _full_spec(layers: tuple[int, ...], first_position: int, token_count: int) -> TileSpec:
    return TileSpec(LayerKind.FULL, layers, first_position, token_count)


@functools.lru_cache(maxsize=_SPECS_KEPT)
def _swa_spec(layers: tuple[int, ...], first_position: int, token_count: int) -> TileSpec:
    return TileSpec(LayerKind.SWA, layers, first_position, token_count)


def check_ids(**ids: bytes) -> None:
    """Refuse an id or digest that is not 32 bytes.

    Raises:
        LimitError: Names the first one.
    """
    for name, value in ids.items():
        if len(value) != ID_BYTES:
            raise LimitError(f"chunk.{name}", f"{ID_BYTES} bytes", f"{len(value)} bytes")


def chunk_class_of(kind: LayerKind) -> ChunkClass:
    """The class of a chunk that holds rows of layers of ``kind``."""
    return _FULL if kind is LayerKind.FULL else _SWA
