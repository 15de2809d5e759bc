"""Writing a bundle: one forward pass, no seek, so a pipe or an upload will do.

Header, objects as they come, manifest, footer. Objects go out as they stand: a receiver that got
them over a wire writes the same file, byte for byte, that their source would write.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvpack import limits
from kvpack.bundle.footer import Footer, encode_footer
from kvpack.bundle.signature import SignatureTranscript, sign
from kvpack.chunk import ChunkReference, SealedChunk, parse_chunk
from kvpack.errors import FormatError
from kvpack.header import decode_header
from kvpack.keys import EpochKey
from kvpack.manifest import manifest_id, open_manifest


class Sink(Protocol):
    """Anything that takes bytes: a file, a pipe, an upload, a :class:`PrivateFile`."""

    def write(self, data: bytes | memoryview, /) -> int | None:
        """Take ``data``, or a first part of it: returns how many bytes, None for all."""


class BundleWriter:
    """Writes one bundle to ``sink``. The header goes out at once.

    Args:
        sink: Where the bytes go. After an error from it the writer is dead.
        key: Root of the header's tenant and epoch.
        header_bytes: The bundle header as stored.
        signer: Signs the stored bytes for readers who hold no secret. None: unsigned.

    Raises:
        FormatError: ``header_bytes`` is not a header; also what :func:`decode_header` raises.
    """

    def __init__(
        self,
        sink: Sink,
        key: EpochKey,
        header_bytes: bytes,
        signer: Ed25519PrivateKey | None = None,
    ) -> None:
        decode_header(header_bytes)
        self._signer = signer
        self._transcript = None if signer is None else SignatureTranscript(header_bytes)
        self._sink = sink
        self._key = key
        self._header = header_bytes
        self._references: list[ChunkReference] = []
        self._chunks_bytes = 0
        self._open = True
        self._write(header_bytes)

    @property
    def references(self) -> tuple[ChunkReference, ...]:
        """What was added, in file order: what the manifest must refer to."""
        return tuple(self._references)

    def add(self, chunk: bytes | memoryview | SealedChunk) -> ChunkReference:
        """Append one chunk object as it stands. The writer checks its framing, not its tag.

        Raises:
            FormatError: Not a chunk object; also LimitError and VersionError.
            RuntimeError: The writer is finished or dead.
        """
        data = chunk.object if isinstance(chunk, SealedChunk) else chunk
        reference = parse_chunk(data)
        count = len(self._references) + 1
        limits.check_range("manifest.references", count, 0, limits.REFERENCES_MAX)
        self._write(data)
        if self._transcript is not None:
            self._transcript.add_object(data)
        self._references.append(reference)
        self._chunks_bytes += len(data)
        return reference

    def finish(self, manifest_blob: bytes) -> Footer:
        """Append the manifest and the footer: from here on the bundle is whole.

        Raises:
            AuthenticationError: The manifest is not authentic under this key and header.
            FormatError: Its references are not the added chunks, in order; also everything that
                :func:`open_manifest` raises.
            RuntimeError: The writer is finished or dead.
        """
        manifest = open_manifest(self._key, self._header, manifest_blob)
        require_same_references(manifest.references, self.references)
        signature = b""
        if self._signer is not None and self._transcript is not None:
            signature = sign(self._signer, self._transcript.message(manifest_blob))
        footer = Footer(
            header_bytes=len(self._header),
            chunk_count=len(self._references),
            chunks_bytes=self._chunks_bytes,
            manifest_bytes=len(manifest_blob),
            signature_bytes=len(signature),
        )
        self._write(manifest_blob)
        self._write(signature)
        self._write(encode_footer(self._key, footer, manifest_id(manifest_blob), signature))
        self._open = False
        return footer

    def _write(self, data: bytes | memoryview) -> None:
        if not self._open:
            raise RuntimeError("this bundle writer is finished, or an earlier write failed")
        self._open = False
        write_all(self._sink, data)
        self._open = True


def write_all(sink: Sink, data: bytes | memoryview) -> None:
    """Write all of ``data``, also to a raw sink that takes a part at a time.

    Raises:
        OSError: The sink takes no more.
    """
    view, written = memoryview(data), 0
    while written < len(view):
        count = sink.write(view[written:])
        if count == 0:
            raise OSError("the sink takes no more bytes")
        written = len(view) if count is None else written + count


def require_same_references(
    expected: tuple[ChunkReference, ...], found: tuple[ChunkReference, ...]
) -> None:
    """Refuse objects that are not the ones a manifest refers to, in its order.

    Raises:
        FormatError: Names the first chunk and field that differ.
    """
    if len(expected) != len(found):
        raise FormatError("manifest.references", f"{len(expected)} chunks", f"{len(found)} chunks")
    for index, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        for field in dataclasses.fields(ChunkReference):
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            if left != right:
                raise FormatError(f"chunks[{index}].{field.name}", _shown(left), _shown(right))


def _shown(value: object) -> object:
    """A field's value for a message: ids short, codes by their names."""
    if isinstance(value, bytes):
        return value.hex()[:16] + "…"
    return value.value if isinstance(value, enum.Enum) else value
