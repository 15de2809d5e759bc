"""What this node's packs are bound to: its model, its tenant's key, and the shape of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpack.chunk import SealContext
from kvpack.header import Header, encode_header
from kvpack.identity import Identity, NumericsFingerprint
from kvpack.keys import EpochKey
from kvpack.layout import CacheLayout

if TYPE_CHECKING:
    from engine import Model


@dataclass(frozen=True, slots=True)
class PackBinding:
    """The same for every pack that one node makes or takes.

    Attributes:
        key: Root of the tenant and epoch.
        identity: Whose rows.
        numerics: On what they are computed here.
        header: The bundle header.
        header_bytes: The same, as it stands in a pack.
        context: What every chunk is sealed under.
    """

    key: EpochKey
    identity: Identity
    numerics: NumericsFingerprint
    header: Header
    header_bytes: bytes
    context: SealContext

    @classmethod
    def of(cls, model: Model, key: EpochKey) -> PackBinding:
        """The binding of ``model`` under ``key``."""
        identity = model.identity(key.tenant)
        header = Header.of(identity, key.epoch)
        context = SealContext(key, header.identity_digest, header.layout_digest)
        return cls(key, identity, model.numerics(), header, encode_header(header), context)

    @property
    def layout(self) -> CacheLayout:
        """Shape of the rows."""
        return self.identity.layout
