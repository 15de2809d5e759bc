"""Verify: is this pack whole, authentic, and of the expected model and shape? Raises, or reports.

The functions never return a bool: a verdict that can be ignored is none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvpack.bundle.forward import ForwardReader
from kvpack.bundle.index import BundleIndex
from kvpack.bundle.reader import BundleReader
from kvpack.bundle.snapshots import require_whole
from kvpack.bundle.walk import Depth, ReadableFile
from kvpack.describe import Description
from kvpack.identity import Identity, require_same_identity, require_same_layout
from kvpack.keys import Keyring
from kvpack.layout import CacheLayout
from kvpack.manifest import manifest_id


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the pack must be, beyond authentic. None: anything.

    Attributes:
        identity: The model that would continue it.
        layout: The shape that would hold it.
    """

    identity: Identity | None = None
    layout: CacheLayout | None = None

    def require(self, index: BundleIndex) -> None:
        """Refuse a bundle of another model or shape.

        Raises:
            IdentityMismatchError: Names the first field that differs.
            LayoutMismatchError: Names the first field of the layout that differs.
        """
        if self.layout is not None:
            require_same_layout(self.layout, index.header.layout)
        if self.identity is not None:
            require_same_identity(self.identity, index.header.identity)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A pack that passed.

    Attributes:
        description: The pack; everything in it is authentic.
        depth: How much of each chunk was checked. QUICK: no payload was read.
        signed: Whether there is a signature block. The footer's MAC covers it; whether the
            signature is valid, and whose, was not asked.
    """

    description: Description
    depth: Depth
    signed: bool


def verify_bundle(
    path: str | os.PathLike[str],
    keyring: Keyring,
    depth: Depth = Depth.FULL,
    expectation: Expectation | None = None,
) -> VerifyReport:
    """Verify the bundle at ``path``: footer and manifest first, then every chunk in file order.

    Raises:
        OSError: The file cannot be opened or read.
        FormatError: Not a bundle; also VersionError, LimitError.
        UnknownKeyError: No key for its tenant and epoch.
        AuthenticationError: Something was changed, replaced or moved.
        IdentityMismatchError: Of another model than expected; also LayoutMismatchError.
        IncompleteError: Good, but a delta: its parent is needed.
    """
    with BundleReader.open(path, keyring) as reader:
        reader.check(depth)
        return _report(reader.index, depth, expectation)


def verify_stream(
    stream: ReadableFile,
    keyring: Keyring,
    depth: Depth = Depth.FULL,
    expectation: Expectation | None = None,
) -> VerifyReport:
    """Verify a bundle that comes through a pipe; nothing of it is kept.

    Raises:
        OSError: The pipe cannot be read. And everything that :func:`verify_bundle` raises.
    """
    index = ForwardReader(stream, keyring, depth=depth).index
    return _report(index, depth, expectation)


def _report(index: BundleIndex, depth: Depth, expectation: Expectation | None) -> VerifyReport:
    if expectation is not None:
        expectation.require(index)
    require_whole(index.manifest)
    description = Description(
        header=index.header,
        manifest=index.manifest,
        manifest_id=manifest_id(index.manifest_blob),
        footer=index.footer,
        verified=True,
    )
    return VerifyReport(description, depth, bool(index.signature))
