"""Stores beside a node's own: folders below those that its operator named, and nowhere else.

A client names a store by a path on the node's machine. What it may so reach is what the operator
gave with ``kvnode serve --store-root``: links are followed first, then the real path is compared.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpack.printable import is_printable
from kvpack.store import Budget, ObjectStore, WriterTools, open_store
from node.errors import UsageError
from node.parked import PLACE_BYTES_MAX

#: Between two looks at a collector that is at work.
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class StoreRoots:
    """The folders below which a node opens stores.

    Attributes:
        roots: None: the node opens no store but its own.
        budget: What each store may take.

    Raises:
        UsageError: One of them is no folder.
    """

    roots: tuple[Path, ...] = ()
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        for root in self.roots:
            if not root.is_dir():
                raise UsageError(f"store root {root}: no such folder")

    def find(self, text: str) -> Path:
        """The real path of the store that ``text`` names.

        Raises:
            UsageError: It is no absolute path, or not below a folder that was named.
        """
        length = len(text.encode("utf-8", errors="replace"))
        if not 1 <= length <= PLACE_BYTES_MAX or not is_printable(text) or text[0] != "/":
            raise UsageError(
                f"store: expected an absolute path of at most {PLACE_BYTES_MAX} printable bytes, "
                f"found {length} bytes"
            )
        try:
            path = Path(text).resolve()
            allowed = [root.resolve() for root in self.roots]
        except (OSError, RuntimeError) as error:
            raise UsageError(f"store {text}: {error}") from error
        if not any(path != root and path.is_relative_to(root) for root in allowed):
            raise UsageError(
                f"store {text}: not below a folder that this node was started with (--store-root)"
            )
        return path

    @contextlib.contextmanager
    def opened(self, text: str, *, create: bool = False) -> Iterator[ObjectStore]:
        """The store at ``text``, closed again at the end of the block.

        Args:
            text: An absolute path on this machine.
            create: Make the store where there is none; the folder above it must be there.

        Raises:
            UsageError: It may not be opened.
            FormatError: Something else is there; also VersionError.
            StoreError: There is no such folder, or others can enter it.
            PublishError: The volume refuses.
        """
        store = open_store(self.find(text), create=create)
        try:
            yield store
        finally:
            store.close()

    def tools(self) -> WriterTools:
        """What a writer of one may not draw by itself."""
        return WriterTools(
            secrets.token_bytes(16), time.time, lambda: time.sleep(_PAUSE_S), self.budget
        )
