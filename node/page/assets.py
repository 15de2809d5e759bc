"""The page's files, read once from the package: small, and the only ones that are ever served."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

_TYPES: Final[Mapping[str, str]] = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, repr=False)
class Asset:
    """One file.

    Attributes:
        name: Its file name.
        media_type: What it is.
        body: Its bytes.
        digest: Of the bytes, short: names this version in addresses and caches.
    """

    name: str
    media_type: str
    body: bytes
    digest: str

    @property
    def url(self) -> str:
        """Where it is served, relative to the page."""
        return f"page/{self.name}?v={self.digest}"


def _read(name: str, media_type: str) -> Asset:
    body = resources.files("node.page").joinpath("static", name).read_bytes()
    return Asset(name, media_type, body, hashlib.sha256(body).hexdigest()[:12])


ASSETS: Final[Mapping[str, Asset]] = {name: _read(name, kind) for name, kind in _TYPES.items()}
