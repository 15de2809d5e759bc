"""A cut in a store: the header and the manifest of a pack, whose chunks lie beside it.

The object is the bundle header's bytes followed by the stored manifest; both say their own length.
Its name is the manifest's MAC, so bytes under a wrong name are found without any key.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpack.chunk import ChunkReference
from kvpack.errors import FormatError
from kvpack.header import Header, decode_header, parse_prefix
from kvpack.keys import Keyring
from kvpack.manifest import Manifest, manifest_id, open_manifest, read_unverified
from kvpack.manifest.sealed import check_blob
from kvpack.store.names import chunk_name, cut_name, peer_name


@dataclass(frozen=True, slots=True, repr=False)
class StoredCut:
    """One cut.

    Attributes:
        cut_id: The manifest's MAC, 32 bytes.
        header: Whose rows.
        manifest: What it holds.
        header_bytes: The header as stored.
        manifest_blob: The manifest as stored, its MAC included.
        verified: Whether the MAC was checked. Where False, everything here is a claim.
    """

    cut_id: bytes
    header: Header
    manifest: Manifest
    header_bytes: bytes
    manifest_blob: bytes
    verified: bool

    def __repr__(self) -> str:
        return f"StoredCut({self.cut_id.hex()[:16]}…, position={self.manifest.position})"

    @property
    def name(self) -> str:
        """The object's name."""
        return cut_name(self.cut_id)

    @property
    def position(self) -> int:
        """Tokens that the cut stands for."""
        return self.manifest.position

    def chunk_names(self, reference: ChunkReference) -> tuple[str, str]:
        """Where the chunk of ``reference`` may lie: ``(shared name, peer's name)``."""
        return chunk_name(reference.seal_id), peer_name(self.cut_id, reference.seal_id)


def join_cut(header_bytes: bytes, manifest_blob: bytes) -> bytes:
    """The object of a cut."""
    return header_bytes + manifest_blob


def split_cut(data: bytes, cut_id: bytes) -> tuple[bytes, bytes]:
    """``(header_bytes, manifest_blob)`` of the object named ``cut_id``. Framing only.

    Raises:
        FormatError: Not a cut, or another one; also VersionError, LimitError.
    """
    length = parse_prefix(data).header_bytes
    header_bytes, blob = data[:length], data[length:]
    check_blob(blob)
    if manifest_id(blob) != cut_id:
        raise FormatError("cut.name", manifest_id(blob).hex()[:16], cut_id.hex()[:16])
    return header_bytes, blob


def read_cut(data: bytes, cut_id: bytes) -> StoredCut:
    """A cut without its key, for collectors and for people. Nothing in it can be trusted.

    Raises:
        FormatError: Not a cut, or another one; also VersionError, LimitError.
        LayoutMismatchError: Fields of one layer contradict each other.
    """
    header_bytes, blob = split_cut(data, cut_id)
    header, manifest = decode_header(header_bytes), read_unverified(blob)
    return StoredCut(cut_id, header, manifest, header_bytes, blob, verified=False)


def open_cut(keyring: Keyring, data: bytes, cut_id: bytes) -> StoredCut:
    """A cut, authentic and gated.

    Raises:
        FormatError: Not a cut, or another one; also VersionError, LimitError.
        UnknownKeyError: No key for its tenant and epoch.
        AuthenticationError: Header or manifest was changed.
        IdentityMismatchError: The target component is another model than the header's.
        LayoutMismatchError: The manifest does not describe one whole state.
    """
    header_bytes, blob = split_cut(data, cut_id)
    prefix = parse_prefix(header_bytes)
    key = keyring.get(prefix.tenant, prefix.epoch)
    manifest = open_manifest(key, header_bytes, blob, in_store=True)
    header = decode_header(header_bytes)
    return StoredCut(cut_id, header, manifest, header_bytes, blob, verified=True)
