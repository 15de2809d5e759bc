"""Of which model each chunk of a pack must be: draft chunks of the draft, all others of the target.

A chunk's header carries the digests of one identity and one layout. A pack with a draft has two of
each, and the chunk's class says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpack.chunk.header import ChunkHeader
from kvpack.chunk.reference import ChunkReference
from kvpack.chunk.seal import SealContext
from kvpack.codes import ChunkClass
from kvpack.errors import FormatError
from kvpack.header import Header
from kvpack.keys import EpochKey
from kvpack.layout import CacheLayout
from kvpack.manifest.model import Manifest
from kvpack.wire import identity_digest, layout_digest


@dataclass(frozen=True, slots=True)
class Binding:
    """One model as its chunks name it.

    Attributes:
        identity_digest: 32 bytes, as every chunk's header must have it.
        layout_digest: 32 bytes, as every chunk's header must have it.
        layout: The shape of its rows.
    """

    identity_digest: bytes
    layout_digest: bytes
    layout: CacheLayout

    def context(self, key: EpochKey) -> SealContext:
        """What its chunks are sealed and opened with, under the key of their epoch."""
        return SealContext(key, self.identity_digest, self.layout_digest)

    def holds(self, header: ChunkHeader) -> bool:
        """Whether a chunk's header says that it is of this model and shape."""
        ours = self.identity_digest, self.layout_digest
        return (header.identity_digest, header.layout_digest) == ours


@dataclass(frozen=True, slots=True)
class Bindings:
    """The models of one pack.

    Attributes:
        target: The header's.
        draft: The draft component's, or None.
    """

    target: Binding
    draft: Binding | None = None

    @classmethod
    def of(cls, header: Header, manifest: Manifest) -> Bindings:
        """Those of a pack that passed the gate."""
        target = Binding(header.identity_digest, header.layout_digest, header.layout)
        model = manifest.draft
        if model is None:
            return cls(target)
        draft = Binding(identity_digest(model.identity), layout_digest(model.layout), model.layout)
        return cls(target, draft)

    def require(self, reference: ChunkReference) -> Binding:
        """The model of one chunk.

        Raises:
            FormatError: A draft chunk where there is no draft.
        """
        if reference.chunk_class is not ChunkClass.DRAFT:
            return self.target
        if self.draft is None:
            raise FormatError("chunk.class", "no draft: the pack has no draft component", "draft")
        return self.draft
