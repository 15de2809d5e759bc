"""Verifying a signed bundle without a secret: who stored these bytes, and are they the same?"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvpack import limits
from kvpack.bundle.index import Tail, check_totals, split_tail
from kvpack.bundle.reader import FileSource, open_regular, read_prefix, read_tail
from kvpack.bundle.signature import SignatureTranscript, check_signature
from kvpack.bundle.writer import require_same_references
from kvpack.chunk import ChunkReference, parse_header
from kvpack.chunk.header import header_bytes as chunk_header_bytes
from kvpack.chunk.reference import HEADER_FIXED_BYTES
from kvpack.errors import FormatError, LimitError
from kvpack.header import Header, decode_header
from kvpack.manifest import Manifest, check_manifest, read_unverified


def verify_signed(
    path: str | os.PathLike[str],
    public_key: bytes,
    progress: Callable[[int], None] | None = None,
) -> tuple[Header, Manifest, Tail]:
    """Verify the signature of the bundle at ``path``, then its shape. Uses no secret.

    Args:
        path: The bundle.
        public_key: The signer that is expected, 32 bytes.
        progress: Told the bytes of every object that is done.

    Raises:
        OSError: The file cannot be opened or read.
        FormatError: Not a bundle, or objects that the manifest does not name; also VersionError,
            LimitError.
        AuthenticationError: Not signed, by another signer, or changed since.
        IdentityMismatchError: The target component is another model than the header's.
        LayoutMismatchError: The manifest does not describe one whole state.
    """
    with open_regular(path) as file:
        source = FileSource(file)
        prefix = read_prefix(source)
        parts = split_tail(read_tail(source), source.file_bytes, prefix.header_bytes)
        header_bytes = source.read(0, prefix.header_bytes)
        transcript = SignatureTranscript(header_bytes)
        references = _hash_objects(source, parts, transcript, progress)
    check_signature(parts.signature, transcript.message(parts.manifest_blob), public_key)
    # From here on all bytes are the signer's.
    header, manifest = decode_header(header_bytes), read_unverified(parts.manifest_blob)
    check_manifest(header, manifest)
    check_totals(parts.footer, manifest)
    require_same_references(manifest.references, references)
    return header, manifest, parts


def _hash_objects(
    source: FileSource,
    parts: Tail,
    transcript: SignatureTranscript,
    progress: Callable[[int], None] | None,
) -> tuple[ChunkReference, ...]:
    """Hash every object between header and manifest, by its own framing."""
    references: list[ChunkReference] = []
    offset, end = parts.footer.header_bytes, parts.footer.manifest_offset
    while offset < end:
        if len(references) == limits.REFERENCES_MAX:
            raise LimitError("chunks", f"at most {limits.REFERENCES_MAX}", "more")
        fixed = source.read(offset, HEADER_FIXED_BYTES)
        reference = parse_header(source.read(offset, chunk_header_bytes(fixed))).reference
        if offset + reference.object_bytes > end:
            left = f"{end - offset} bytes"
            raise FormatError(f"chunks[{len(references)}]", left, reference.object_bytes)
        transcript.add_object(source.read(offset, reference.object_bytes))
        references.append(reference)
        offset += reference.object_bytes
        if progress is not None:
            progress(reference.object_bytes)
    return tuple(references)
