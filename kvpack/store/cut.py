"""A cut in a store: the header and the manifest of a pack, whose chunks lie beside it.

The object is the bundle header's bytes followed by the stored manifest; both say their own length.
Its name is the manifest's MAC, so bytes under a wrong name are found without any key.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvpack.chunk import ChunkReference
from kvpack.errors import FormatError
from kvpack.header import Header, decode_header, parse_prefix
from kvpack.keys import EpochKey, Keyring
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
    known = _opened.find(key, header_bytes, blob)
    if known is not None:
        return known
    manifest = open_manifest(key, header_bytes, blob, in_store=True)
    header = decode_header(header_bytes)
    cut = StoredCut(cut_id, header, manifest, header_bytes, blob, verified=True)
    _opened.keep(key, cut)
    return cut


class _Opened:
    """Cuts that were opened last: a conversation that goes on opens one cut again and again.

    A cut is found again by every byte of it and by the key that proved it, so the answer is the one
    that opening it would give.
    """

    def __init__(self, references_max: int) -> None:
        self._references_max = references_max
        self._cuts: OrderedDict[bytes, tuple[EpochKey, StoredCut]] = OrderedDict()
        self._references = 0
        self._lock = threading.Lock()

    def find(self, key: EpochKey, header_bytes: bytes, blob: bytes) -> StoredCut | None:
        """The cut of exactly these bytes under exactly this key, if it was opened before."""
        with self._lock:
            known = self._cuts.get(manifest_id(blob))
            if known is None or known[0] != key:
                return None
            cut = known[1]
            if (cut.header_bytes, cut.manifest_blob) != (header_bytes, blob):
                return None
            self._cuts.move_to_end(cut.cut_id)
            return cut

    def keep(self, key: EpochKey, cut: StoredCut) -> None:
        """Keep ``cut``; what was asked for longest ago makes room."""
        with self._lock:
            self._drop(cut.cut_id)
            self._cuts[cut.cut_id] = key, cut
            self._references += len(cut.manifest.references)
            while self._references > self._references_max:
                self._drop(next(iter(self._cuts)))

    def _drop(self, cut_id: bytes) -> None:
        known = self._cuts.pop(cut_id, None)
        if known is not None:
            self._references -= len(known[1].manifest.references)


#: Of the longest manifest a reference takes about 800 bytes, so this is 7 MB.
_opened: Final = _Opened(references_max=8192)
