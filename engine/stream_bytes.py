"""Which bytes of a text a token stands for.

Decoding tokens one by one as text breaks every character that is split over two of them. Bytes do
not have that problem: the text of a generation is the joined bytes of its tokens, decoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from engine.errors import ModelFolderError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText(Protocol):
    """What is needed of a tokenizer."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The token's own spelling, None for an id that it does not know."""


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level spelling stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in shown]
    alphabet = {chr(value): value for value in shown}
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(hidden)})
    return alphabet


_ALPHABET: Final[Mapping[str, int]] = byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level spelling; one with a foreign character stands for itself."""
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def byte_fallback_bytes(token: str) -> bytes:
    """Bytes of a spelling that writes a space as U+2581 and a lone byte as ``<0xAB>``."""
    lone = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(lone[1], 16)]) if lone else token.replace("\u2581", " ").encode()


@dataclass(frozen=True, slots=True, repr=False)
class TokenBytes:
    """Bytes of any token of one tokenizer, special tokens as they are written.

    What is generated continues a text, so no space is taken off its beginning.

    Attributes:
        tokenizer: Knows each token's spelling.
        byte_level: True where spellings are byte-level, False where they have byte fallback.
    """

    tokenizer: TokenText
    byte_level: bool

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes:  # noqa: ANN401  transformers is untyped
        """The rule of a fast tokenizer of ``transformers``.

        Raises:
            ModelFolderError: Its tokens do not stand for bytes in either of the two known ways.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            raise ModelFolderError("tokenizer: it does not say how tokens become text")
        kinds = decoder_kinds(json.loads(decoder.__getstate__()))
        if kinds == ["ByteLevel"]:
            return cls(tokenizer, byte_level=True)
        if "ByteFallback" in kinds and "ByteLevel" not in kinds:
            return cls(tokenizer, byte_level=False)
        shown = ", ".join(kinds)
        raise ModelFolderError(
            f"tokenizer: decoder {shown} is not supported (supported: ByteLevel, ByteFallback)"
        )

    def __call__(self, token_id: int) -> bytes:
        """Bytes of ``token_id``; none for a reserved id that has no token."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        return byte_level_bytes(token) if self.byte_level else byte_fallback_bytes(token)


def decoder_kinds(decoder: Mapping[str, Any]) -> list[str]:
    """Kinds of a decoder's steps, in order."""
    if decoder.get("type") == "Sequence":
        return [kind for step in decoder["decoders"] for kind in decoder_kinds(step)]
    return [str(decoder.get("type"))]
