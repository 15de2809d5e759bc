"""Verify: is this pack whole, authentic, and of the expected model and shape? Raises, or reports.

The functions never return a bool: a verdict that can be ignored is none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from kvpack.bundle.forward import ForwardReader
from kvpack.bundle.index import BundleIndex
from kvpack.bundle.payload import Depth
from kvpack.bundle.reader import BundleReader
from kvpack.bundle.signed import verify_signed
from kvpack.bundle.snapshots import require_whole
from kvpack.bundle.source import ReadableFile
from kvpack.describe import Description
from kvpack.errors import FormatError, LimitError
from kvpack.header import Header
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

    def require(self, header: Header) -> None:
        """Refuse a bundle of another model or shape.

        Raises:
            IdentityMismatchError: Names the first field that differs.
            LayoutMismatchError: Names the first field of the layout that differs.
        """
        if self.layout is not None:
            require_same_layout(self.layout, header.layout)
        if self.identity is not None:
            require_same_identity(self.identity, header.identity)


@dataclass(frozen=True, slots=True)
class Sample:
    """Which chunks are opened where not all are: the same ones of the same pack, every time.

    Attributes:
        percent: How many of a hundred chunks, rounded up: never none.

    Raises:
        LimitError: Not above 0, or above 100.
    """

    percent: float

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise LimitError("sample", "above 0 and at most 100 percent", self.percent)

    def choose(self, manifest_blob: bytes, count: int) -> frozenset[int]:
        """Indices of the chunks to open: those with the smallest BLAKE3(manifest's MAC ‖ index).

        It finds damage that spares nobody. Whoever can rewrite the file can tell which chunks are
        chosen, so against an attacker only a whole verification counts.
        """
        marks = sorted(
            (blake3(manifest_id(manifest_blob) + index.to_bytes(4, "little")).digest(), index)
            for index in range(count)
        )
        return frozenset(index for _, index in marks[: math.ceil(count * self.percent / 100)])


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A pack that passed.

    Attributes:
        description: The pack; everything in it is authentic.
        depth: How much of each chunk was checked with the key. QUICK: no payload was read. None: no
            key was used, and every stored byte is covered by the signature.
        signed: Whether there is a signature block. The footer's MAC covers it; whether the
            signature is valid, and whose, says ``signer``.
        opened: How many chunks were opened.
        signer: The public key whose signature was checked, or None: not asked.
    """

    description: Description
    depth: Depth | None
    signed: bool
    opened: int = 0
    signer: bytes | None = None


def verify_bundle(
    path: str | os.PathLike[str],
    keyring: Keyring,
    depth: Depth = Depth.FULL,
    expectation: Expectation | None = None,
    *,
    sample: Sample | None = None,
    signer: bytes | None = None,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> VerifyReport:
    """Verify the bundle at ``path``: footer and manifest first, then every chunk in file order.

    Args:
        path: The bundle.
        keyring: The tenant's keys.
        depth: How much of each chunk.
        expectation: What the pack must be.
        sample: Which chunks, or None for all.
        signer: The public key that must have signed it, or None.
        progress: Told the bytes of every object that is done.
        threads: How many chunks are checked at a time. None: as many as there are cores for it. The
            verdict is the same.

    Raises:
        OSError: The file cannot be opened or read.
        FormatError: Not a bundle; also VersionError, LimitError.
        UnknownKeyError: No key for its tenant and epoch.
        AuthenticationError: Something was changed, replaced or moved, or another signed it.
        IdentityMismatchError: Of another model than expected; also LayoutMismatchError.
        IncompleteError: Good, but a delta: its parent is needed.
    """
    with BundleReader.open(path, keyring) as reader:
        index, count = reader.index, len(reader.manifest.references)
        chosen = None if sample is None else sample.choose(index.manifest_blob, count)
        reader.check(depth, chosen, progress, threads=threads)
        opened = 0 if depth is Depth.QUICK else count if chosen is None else len(chosen)
    if signer is not None:
        _, _, tail = verify_signed(path, signer, progress, threads=threads)
        # The file was read twice; a verdict is about one file.
        if (tail.manifest_blob, tail.signature) != (index.manifest_blob, index.signature):
            raise FormatError("file", "the same file all along", "another one meanwhile")
    return _report(index, depth, expectation, opened, signer)


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
    opened = 0 if depth is Depth.QUICK else len(index.manifest.references)
    return _report(index, depth, expectation, opened, None)


def verify_signature(
    path: str | os.PathLike[str],
    signer: bytes,
    expectation: Expectation | None = None,
    progress: Callable[[int], None] | None = None,
    *,
    threads: int | None = None,
) -> VerifyReport:
    """Verify the bundle at ``path`` by its signature alone, without a secret.

    Every stored byte but the footer's MAC is the signer's then. Nothing is decrypted.

    Raises:
        OSError: The file cannot be opened or read. And everything that
            :func:`kvpack.bundle.verify_signed` raises; IncompleteError for a delta.
    """
    header, manifest, tail = verify_signed(path, signer, progress, threads=threads)
    if expectation is not None:
        expectation.require(header)
    require_whole(manifest)
    description = Description(
        header, manifest, manifest_id(tail.manifest_blob), tail.footer, verified=True
    )
    return VerifyReport(description, None, signed=True, signer=signer)


def _report(
    index: BundleIndex,
    depth: Depth,
    expectation: Expectation | None,
    opened: int,
    signer: bytes | None,
) -> VerifyReport:
    if expectation is not None:
        expectation.require(index.header)
    require_whole(index.manifest)
    description = Description(
        header=index.header,
        manifest=index.manifest,
        manifest_id=manifest_id(index.manifest_blob),
        footer=index.footer,
        verified=True,
    )
    return VerifyReport(description, depth, bool(index.signature), opened, signer)
