"""The keyed prefix chain: names for "these tokens, under this key, model and layout".

One link for each whole block of 256 tokens, each over the one before it, so equal links mean equal
prefixes from token 0 on. A cut lies in the block after its last whole one and is named by a tail
over the remaining ids. Without the key a link says nothing: not the tokens, not the tenant, and no
guess can be tried.

Every input has a fixed length or stands behind its length; the first byte tells root, block and
tail apart. Nothing depends on the process: the same tokens give the same links everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpack import limits
from kvpack.chunk.reference import check_ids
from kvpack.keys import EpochKey

LINK_BYTES: Final = 32

_ROOT: Final = b"r"
_BLOCK: Final = b"b"
_TAIL: Final = b"t"


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """Whose prefixes: one key, one model, one shape. Links of two scopes never meet.

    Attributes:
        key: Root of the tenant and epoch.
        identity_digest: 32 bytes, :func:`kvpack.wire.identity_digest`.
        layout_digest: 32 bytes, :func:`kvpack.wire.layout_digest`.

    Raises:
        LimitError: A digest is not 32 bytes.
    """

    key: EpochKey
    identity_digest: bytes
    layout_digest: bytes

    def __post_init__(self) -> None:
        check_ids(identity_digest=self.identity_digest, layout_digest=self.layout_digest)

    def links(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The link of every whole-block prefix of ``token_ids``, the empty one first.

        Returns:
            ``len(token_ids) // 256 + 1`` links of 32 bytes; number k stands for 256 k tokens.

        Raises:
            LimitError: There are too many ids, or one is outside its cap.
        """
        check_token_ids(token_ids)
        key = self.key.subkey("prefix")
        tenant = self.key.tenant.encode()
        root = _ROOT + len(tenant).to_bytes(2, "little") + tenant
        links = [blake3(root + self.identity_digest + self.layout_digest, key=key).digest()]
        for first in range(0, len(token_ids) - limits.GRID_TOKENS + 1, limits.GRID_TOKENS):
            block = pack_ids(token_ids[first : first + limits.GRID_TOKENS])
            links.append(blake3(_BLOCK + links[-1] + block, key=key).digest())
        return tuple(links)

    def tail(self, link: bytes, token_ids: Sequence[int]) -> bytes:
        """What names a cut ``len(token_ids)`` tokens after the blocks of ``link``: 32 bytes.

        Args:
            link: The last whole block's link.
            token_ids: The ids after it, 0 to 255.

        Raises:
            LimitError: There are too many ids, or one is outside its cap.
        """
        limits.check_range("prefix.tail", len(token_ids), 0, limits.GRID_TOKENS - 1, "tokens")
        check_token_ids(token_ids)
        count = len(token_ids).to_bytes(2, "little")
        named = _TAIL + link + count + pack_ids(token_ids)
        return blake3(named, key=self.key.subkey("prefix")).digest()


def check_token_ids(token_ids: Sequence[int]) -> None:
    """Refuse ids that no pack could hold.

    Raises:
        LimitError: There are too many, or one is outside its cap.
    """
    limits.check_range("token_ids", len(token_ids), 0, limits.POSITION_MAX)
    if token_ids:
        limits.check_range("token_ids.min", min(token_ids), 0, limits.TOKEN_ID_MAX)
        limits.check_range("token_ids.max", max(token_ids), 0, limits.TOKEN_ID_MAX)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """``token_ids``, four bytes each, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
