"""Everything of a bundle but its chunks: header, manifest, signature block, footer.

Both readers come here with the same bytes, found from the two ends; the order of the checks is that
of docs/spec/kvpack-v1.md, section 9.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpack.bundle.footer import (
    FOOTER_BYTES,
    SIGNATURE_BYTES,
    Footer,
    check_footer_mac,
    decode_footer,
)
from kvpack.chunk import ChunkHeader
from kvpack.chunk.open import check_binding
from kvpack.codes import Codec
from kvpack.errors import AuthenticationError, FormatError
from kvpack.header import Header
from kvpack.keys import EpochKey
from kvpack.manifest import Bindings, Manifest, manifest_id
from kvpack.manifest.sealed import BLOB_BYTES_MAX, check_blob, open_under_header

#: Nothing after the last chunk is longer than this.
TAIL_BYTES_MAX = BLOB_BYTES_MAX + SIGNATURE_BYTES + FOOTER_BYTES


@dataclass(frozen=True, slots=True, repr=False)
class BundleIndex:
    """Header and manifest of one bundle, authentic and gated.

    Attributes:
        header: Whose rows.
        header_bytes: The header as stored.
        manifest: What the bundle holds.
        manifest_blob: The manifest as stored, its MAC included.
        signature: Public key and signature, or empty.
        footer: Lengths of the parts.
        bindings: Of which model each chunk must be.
    """

    header: Header
    header_bytes: bytes
    manifest: Manifest
    manifest_blob: bytes
    signature: bytes
    footer: Footer
    bindings: Bindings

    @property
    def identity_digest(self) -> bytes:
        """32 bytes: the target's identity."""
        return self.bindings.target.identity_digest

    @property
    def layout_digest(self) -> bytes:
        """32 bytes: the target's layout."""
        return self.bindings.target.layout_digest

    def likely_header(self, index: int) -> ChunkHeader | None:
        """The one header that :meth:`require` lets pass as number ``index``, or None.

        None where the manifest does not say all of it: a codec's digest stands in the header alone.
        """
        reference = self.manifest.references[index]
        if reference.codec is not Codec.RAW or reference.is_trimmed:
            return None
        binding = self.bindings.require(reference)
        return ChunkHeader(reference, binding.identity_digest, binding.layout_digest)

    def require(self, index: int, header: ChunkHeader, *, tag_checked: bool) -> None:
        """Refuse a chunk that is not number ``index`` of this bundle.

        Args:
            index: Its place in file order.
            header: Its header.
            tag_checked: Whether the header is authentic: only then can it be called another's.

        Raises:
            AuthenticationError: The manifest names another chunk there.
            IdentityMismatchError: A chunk of another model; also LayoutMismatchError.
        """
        if header.reference != self.manifest.references[index]:
            raise not_named_here(index)
        binding, where = self.bindings.require(header.reference), f"chunks[{index}]"
        if not tag_checked and not binding.holds(header):
            raise AuthenticationError(where, "identity or layout digest")
        check_binding(binding, header, where)


def not_named_here(index: int) -> AuthenticationError:
    """The error about an authentic chunk in a place where the manifest has another."""
    return AuthenticationError(f"chunks[{index}]", "not the chunk that the manifest names here")


def beyond_its_place(index: int) -> FormatError:
    """The error about an object that by its own header would reach into the manifest."""
    return FormatError(f"chunks[{index}]", "an end before the manifest", "a longer object")


def open_index(key: EpochKey, header_bytes: bytes, tail: bytes, file_bytes: int) -> BundleIndex:
    """Check everything that is not a chunk.

    Args:
        key: Root of the header's tenant and epoch.
        header_bytes: The header as stored.
        tail: Everything after the last chunk.
        file_bytes: Real length of the file or stream.

    Raises:
        FormatError: The footer is not one, or lengths contradict each other; also VersionError,
            LimitError.
        AuthenticationError: Header, manifest, signature block or footer was changed.
        IdentityMismatchError: The target component is another model than the header's.
        LayoutMismatchError: The manifest does not describe one whole state.
    """
    parts = split_tail(tail, file_bytes, len(header_bytes))
    blob = parts.manifest_blob
    check_footer_mac(key, parts.footer_bytes, manifest_id(blob), parts.signature)
    header, manifest = open_under_header(key, header_bytes, blob)
    check_totals(parts.footer, manifest)
    return BundleIndex(
        header=header,
        header_bytes=header_bytes,
        manifest=manifest,
        manifest_blob=blob,
        signature=parts.signature,
        footer=parts.footer,
        bindings=Bindings.of(header, manifest),
    )


def check_totals(footer: Footer, manifest: Manifest) -> None:
    """The footer counts what the manifest refers to.

    Raises:
        FormatError: The count or the sum of the objects' lengths differs.
    """
    references = manifest.references
    if footer.chunk_count != len(references):
        raise FormatError("footer.chunk_count", len(references), footer.chunk_count)
    chunks_bytes = sum(reference.object_bytes for reference in references)
    if footer.chunks_bytes != chunks_bytes:
        raise FormatError("footer.chunks_bytes", chunks_bytes, footer.chunks_bytes)


@dataclass(frozen=True, slots=True, repr=False)
class Tail:
    """Everything after the last chunk, cut into its parts. Framing only.

    Attributes:
        manifest_blob: Prefix, message and MAC.
        signature: Public key and signature, or empty.
        footer_bytes: The footer as stored.
        footer: The footer's lengths.
    """

    manifest_blob: bytes
    signature: bytes
    footer_bytes: bytes
    footer: Footer


def split_tail(tail: bytes, file_bytes: int, header_bytes: int) -> Tail:
    """Cut the tail into manifest, signature block and footer, by the footer's lengths.

    Args:
        tail: Everything after the last chunk.
        file_bytes: Real length of the file or stream.
        header_bytes: Real length of the header.

    Raises:
        FormatError: The lengths contradict the tail, the header or the file; also VersionError,
            LimitError.
    """
    footer_bytes = tail[-FOOTER_BYTES:]
    footer = decode_footer(footer_bytes, file_bytes)
    if footer.header_bytes != header_bytes:
        raise FormatError("footer.header_bytes", header_bytes, footer.header_bytes)
    if footer.tail_bytes != len(tail):
        raise FormatError("footer.manifest_bytes", f"a tail of {footer.tail_bytes}", len(tail))
    signature_end = footer.manifest_bytes + footer.signature_bytes
    blob = tail[: footer.manifest_bytes]
    check_blob(blob)
    return Tail(blob, tail[footer.manifest_bytes : signature_end], footer_bytes, footer)
