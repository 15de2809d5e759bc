"""A vector: a text header, an empty line, the raw pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from tests.vector_kit.chunks import TENANT, root
from tests.vector_kit.packs import SIGNER, Pack


@dataclass(frozen=True)
class Vector:
    """``expect`` is ``ok``, or a reason and the stage that finds it, in both read orders."""

    name: str
    expect: str
    comment: str
    pack: Pack
    released: int = 0  # chunks whose plaintext is handed out, from the footer, before the error
    keys: Sequence[tuple[str, int, int]] = ((TENANT, 1, 0),)  # tenant, epoch, holder
    signed: bool = False
    shape: str = "swa(5) full swa(5); heads 1; dims 2, 3; f16"

    def encode(self) -> bytes:
        """The bytes of its file."""
        data, plain = self.pack.build()
        whole = self.expect == "ok" and not self.signed
        handed = plain if whole else plain[: self.released]
        lines = [
            f"expect: {self.expect}",
            f"released: {blake3(b''.join(handed)).hexdigest()}",
            f"key: {self._key()}",
            f"layout: {self.shape}",
            f"comment: {self.comment}",
        ]
        return "\n".join(lines).encode() + b"\n\n" + data

    def _key(self) -> str:
        if self.signed:
            return f"signer {SIGNER.public_key().public_bytes_raw().hex()}"
        return ", ".join(
            f"{tenant} {epoch} {root(epoch, holder).hex()}" for tenant, epoch, holder in self.keys
        )
