"""Caches of other engines as packs, and back: the part that knows no engine.

An engine offers its formats through the entry point group ``kvpack.interchange``; this module
finds them by name and never imports one itself. What comes from there is checked by the same gate
as everything else: the manifest is sealed only if it describes one whole state.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from kvpack.bundle import BundleWriter, Footer, Header, encode_header
from kvpack.bundle.writer import Sink
from kvpack.chunk import Codec, SealContext, seal_tile, seal_token_ids
from kvpack.errors import FormatError, KvpackError, LayoutMismatchError
from kvpack.identity import CallSchedule, Identity, NumericsFingerprint
from kvpack.keys import EpochKey
from kvpack.layout import Producer
from kvpack.manifest import Component, ComponentKind, ForeignRingHead, Manifest, seal_manifest
from kvpack.snapshot import SessionCacheSnapshot, Tile, TileSpec, cut_tile_specs

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "kvpack.interchange"

#: Which extra of this package brings the engine that reads a format.
EXTRAS: Final = MappingProxyType({"mlx-lm": "mlx"})


class ExtraMissingError(KvpackError):
    """Nothing that is installed reads this format."""

    reason = "extra_missing"

    def __init__(self, name: str, detail: str) -> None:
        self.extra = EXTRAS.get(name, "")
        super().__init__(f"format {name!r}: {detail}")


class CacheFileError(FormatError):
    """A file of another engine is cut, damaged, or contradicts itself."""

    reason = "malformed_cache_file"


class CacheFormatError(FormatError):
    """A whole file, but of a kind that is not read here; ``found`` names it."""

    reason = "unknown_cache_format"


class CacheMismatchError(LayoutMismatchError):
    """A whole file, but not of this model or not of these tokens."""

    reason = "cache_mismatch"


class PromptFileError(FormatError):
    """What was given as the tokens of a cache is neither ids nor text."""

    reason = "malformed_prompt"


@dataclass(frozen=True, slots=True, repr=False)
class ForeignCache:
    """What one file of another engine holds, as a pack needs it.

    Attributes:
        producer: Whose rows.
        token_ids: The tokens that the state stands for; their number is the position.
        numerics: What is known of how the rows were computed.
        ring_heads: One for every sliding-window layer, ascending: where its ring began.
        read_tile: Copies the rows of one tile out of the file.
    """

    producer: Producer
    token_ids: tuple[int, ...]
    numerics: NumericsFingerprint
    ring_heads: tuple[ForeignRingHead, ...]
    read_tile: Callable[[TileSpec], Tile]

    @property
    def position(self) -> int:
        """Tokens that the state stands for."""
        return len(self.token_ids)


class CacheModel(Protocol):
    """One loaded model and the files of one format that belong to it."""

    @property
    def file_bytes_max(self) -> int:
        """No file of this model is longer; a longer one is not even read."""

    def identity(self, tenant: str) -> Identity:
        """Whose rows a file of this model holds."""

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of ``text`` as the other engine feeds a prompt that it saves."""

    def read(self, data: bytes | memoryview, token_ids: Sequence[int]) -> ForeignCache:
        """Check the whole file against the model and the ids.

        Raises:
            CacheFileError: It is damaged.
            CacheFormatError: It is of a kind that is not read.
            CacheMismatchError: It is of another model, or of another number of tokens.
        """

    def write(
        self, snapshot: SessionCacheSnapshot, ring_heads: Sequence[ForeignRingHead], label: str
    ) -> Iterator[bytes]:
        """The file's bytes, piece by piece.

        Args:
            snapshot: The state, of this very model.
            ring_heads: Where the rings began, if the state came from this format; else empty.
            label: What the other engine is to call the model.

        Raises:
            LayoutMismatchError: The snapshot is not one that the other engine can continue.
        """


class CacheFormat(Protocol):
    """What an entry point of the group is."""

    def open_model(self, folder: Path) -> CacheModel:
        """Load the model in ``folder``.

        Raises:
            KvpackError: The folder cannot be used.
        """


class Continuation(enum.Enum):
    """What may be said of a continuation whose state is exact."""

    EXACT = "exact"
    COMPATIBLE = "compatible"


def find_format(name: str) -> CacheFormat:
    """The format called ``name``, from whatever is installed.

    Raises:
        ExtraMissingError: Nothing offers it, or what it needs is not installed.
    """
    # Imported here: it loads a mail parser and a socket module, which nothing else needs.
    import importlib.metadata

    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.name == name:
            return _load(entry)
    raise ExtraMissingError(name, "no engine that reads it is installed")


def _load(entry: EntryPoint) -> CacheFormat:
    try:
        made: CacheFormat = entry.load()()
    except ModuleNotFoundError as error:
        raise ExtraMissingError(entry.name, f"module {error.name!r} is not installed") from error
    return made


def continuation_of(
    producer: Producer, theirs: NumericsFingerprint, ours: NumericsFingerprint
) -> Continuation:
    """What our own engine may say when it continues rows of ``producer``.

    Args:
        producer: Who computed the rows.
        theirs: The numerics of the pack.
        ours: The numerics of this process.

    Raises:
        LayoutMismatchError: The rows are the oracle's, which nobody but the oracle continues.
    """
    if producer is Producer.ORACLE:
        raise LayoutMismatchError("producer", "any but oracle", producer.value)
    # Another engine's kernels and call shapes are not ours, whatever its fingerprint says.
    equal = producer is Producer.ENGINE and theirs.first_difference(ours) is None
    return Continuation.EXACT if equal else Continuation.COMPATIBLE


def write_foreign_cache(
    sink: Sink, key: EpochKey, header: Header, cache: ForeignCache, codec: Codec = Codec.RAW
) -> Footer:
    """Write ``cache`` as one whole bundle, tile by tile: the rows exist twice for one tile only.

    The schedule stays empty: in which calls another engine computed its rows is not in its files.

    Args:
        sink: Where the bytes go; no seek is needed.
        key: Root of the header's tenant and epoch.
        header: Whose rows.
        cache: The state.
        codec: For the rows.

    Raises:
        LayoutMismatchError: A tile is of another size than the layout implies.
    """
    context = SealContext(key, header.identity_digest, header.layout_digest)
    header_bytes = encode_header(header)
    writer = BundleWriter(sink, key, header_bytes)
    element_bytes = header.layout.encoding.element_bytes
    for spec in cut_tile_specs(header.layout, cache.position):
        tile = cache.read_tile(spec)
        writer.add(seal_tile(context, tile, codec, element_bytes=element_bytes))
    for chunk in seal_token_ids(context, cache.token_ids):
        writer.add(chunk)
    manifest = Manifest(
        producer=cache.producer,
        position=cache.position,
        numerics=cache.numerics,
        schedule=CallSchedule(),
        references=writer.references,
        components=(Component(ComponentKind.TARGET, context.identity_digest),),
        foreign_ring_heads=cache.ring_heads,
    )
    return writer.finish(seal_manifest(key, header_bytes, manifest))
