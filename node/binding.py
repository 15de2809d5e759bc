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
        numerics: On what they are computed here; never those of mixed rows.
        header: The bundle header.
        header_bytes: The same, as it stands in a pack.
        context: What every chunk is sealed under.

    Rows are this node's own where numerics that equal its own computed all of them; otherwise they
    are mixed. :meth:`owns` tells when they come, :meth:`stated` is what is said of them when they
    go, and in between their generation knows (``Generation.is_mixed``). There is no other rule.

    Raises:
        ValueError: Nobody computes on such numerics.
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

    def __post_init__(self) -> None:
        if self.numerics.is_mixed:
            raise ValueError("numerics: those of mixed rows are no node's own")

    def owns(self, numerics: NumericsFingerprint) -> bool:
        """Whether rows of ``numerics`` are those that this node would have computed."""
        return self.numerics == numerics

    def stated(self, *, mixed: bool) -> NumericsFingerprint:
        """What is said of rows that leave this node, in a Prepare as in a manifest.

        Args:
            mixed: They are not all this node's own. Then it is no node's numerics, also not those
                of the build that some of them came from: whoever reads it calls them compatible.
        """
        return self.numerics.of_mixed_rows() if mixed else self.numerics

    @property
    def layout(self) -> CacheLayout:
        """Shape of the rows."""
        return self.identity.layout
