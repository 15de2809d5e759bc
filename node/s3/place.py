"""``s3://BUCKET/PREFIX``: where a store lies, and nothing else. No account, no endpoint, no option.

Who we are and where the service is come from the standard chain (:mod:`node.s3.settings`), so a URL
can be logged, kept in a directory and shown to anybody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from kvpack.store.errors import StoreError
from kvpack.store.places import shown

SCHEME: Final = "s3://"

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*")

#: S3 keys have at most 1,024 bytes, and the longest name of an object has 185.
PREFIX_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket and a prefix.

    Attributes:
        bucket: Its name.
        prefix: Segments with slashes between them; may be empty.

    Raises:
        StoreError: Not such a place.
    """

    bucket: str
    prefix: str = ""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise StoreError(
                "s3 bucket: expected 3 to 63 of a-z, 0-9, '.' and '-', "
                f"found {len(self.bucket)} characters"
            )
        if len(self.prefix) > PREFIX_BYTES_MAX:
            raise StoreError(
                f"s3 prefix: expected at most {PREFIX_BYTES_MAX} bytes, found {len(self.prefix)}"
            )
        parts = self.prefix.split("/") if self.prefix else []
        if not all(_SEGMENT.fullmatch(part) for part in parts):
            raise StoreError(
                "s3 prefix: expected segments of letters, digits and ._=+- that begin with no dot, "
                "with one '/' between them"
            )

    @classmethod
    def parse(cls, url: str) -> S3Place:
        """Read ``s3://BUCKET/PREFIX``; one slash at the end does not count.

        Raises:
            StoreError: Something else. What was given is not repeated where it may hold a secret.
        """
        if not url.startswith(SCHEME) or shown(url) != url:
            raise StoreError(
                "store: expected s3://BUCKET/PREFIX without account, port or options: credentials "
                "come from the environment or from files"
            )
        bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        return cls(bucket, prefix.removesuffix("/"))

    @property
    def url(self) -> str:
        """How it is written."""
        return f"{SCHEME}{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def is_below(self, root: S3Place) -> bool:
        """Whether it lies in ``root``, and is not ``root`` itself."""
        within = f"{root.prefix}/" if root.prefix else ""
        return (
            self.bucket == root.bucket
            and self.prefix != root.prefix
            and self.prefix.startswith(within)
        )
