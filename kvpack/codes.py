"""Which number stands for which word, everywhere in the format. Zero never stands for anything."""

from __future__ import annotations

import enum
from typing import Final, Generic, TypeVar

from kvpack.errors import FormatError
from kvpack.layout import Encoding, LayerKind, Producer


class ChunkClass(enum.Enum):
    """What the plaintext of a chunk is."""

    FULL = "full"
    SWA = "swa"
    TOKEN_IDS = "token_ids"  # noqa: S105 - a word, not a password
    FINAL_LOGITS = "final_logits"
    SAMPLER = "sampler"
    DRAFT = "draft"
    SESSION = "session"


class Codec(enum.Enum):
    """How plaintext became the bytes that are encrypted."""

    RAW = "raw"
    ZSTD_SPLIT = "zstd_split"


class Aead(enum.Enum):
    """Which cipher seals a chunk."""

    AES_256_GCM = "aes_256_gcm"
    CHACHA20_POLY1305 = "chacha20_poly1305"


class RoleOrder(enum.Enum):
    """In which order the rows of one layer lie in a tile. OPAQUE: the payload has no rows."""

    KEYS_THEN_VALUES = "keys_then_values"
    OPAQUE = "opaque"


class ComponentKind(enum.Enum):
    """Whose state a component is."""

    TARGET = "target"
    DRAFT = "draft"


class WindowRule(enum.Enum):
    """Which keys a query sees. SELF_AND_BEFORE: the query at p sees ``p - window + 1 .. p``."""

    SELF_AND_BEFORE = "self_and_before"


class Pairing(enum.Enum):
    """Which elements of a head rotate together: ``(i, i + dims/2)``, or ``(0, 1), (2, 3), …``."""

    HALVES = "halves"
    INTERLEAVED = "interleaved"


_Word = TypeVar("_Word", bound=enum.Enum)


class Codes(Generic[_Word]):
    """The words that one field may hold; their codes are 1, 2, … in the order given."""

    def __init__(self, *members: _Word) -> None:
        self._members = members
        # Members are single objects that live as long as the program; hashing one runs Python code.
        self._codes = {id(member): code for code, member in enumerate(members, start=1)}
        self.words: Final = tuple(str(member.value) for member in members)

    def code(self, member: _Word) -> int:
        """The number of ``member``."""
        return self._codes[id(member)]

    def member(self, code: int, field: str) -> _Word:
        """The word of ``code``.

        Raises:
            FormatError: No word has this code; names ``field`` and lists the known ones.
        """
        if not 1 <= code <= len(self._members):
            raise FormatError(field, f"one of: {self.known}", code)
        return self._members[code - 1]

    @property
    def known(self) -> str:
        """Every code with its word, for people."""
        return ", ".join(f"{code} {word}" for code, word in enumerate(self.words, start=1))


LAYER_KINDS: Final = Codes(LayerKind.SWA, LayerKind.FULL)
ENCODINGS: Final = Codes(Encoding.F16LE, Encoding.BF16LE, Encoding.F32LE)
PAIRINGS: Final = Codes(Pairing.HALVES, Pairing.INTERLEAVED)
PRODUCERS: Final = Codes(
    Producer.ENGINE, Producer.ORACLE, Producer.TRANSFORMERS, Producer.MLX_LM
)  # fmt: skip
CHUNK_CLASSES: Final = Codes(
    ChunkClass.FULL,
    ChunkClass.SWA,
    ChunkClass.TOKEN_IDS,
    ChunkClass.FINAL_LOGITS,
    ChunkClass.SAMPLER,
    ChunkClass.DRAFT,
    ChunkClass.SESSION,
)
CODECS: Final = Codes(Codec.RAW, Codec.ZSTD_SPLIT)
AEADS: Final = Codes(Aead.AES_256_GCM, Aead.CHACHA20_POLY1305)
ROLE_ORDERS: Final = Codes(RoleOrder.KEYS_THEN_VALUES, RoleOrder.OPAQUE)
COMPONENT_KINDS: Final = Codes(ComponentKind.TARGET, ComponentKind.DRAFT)
WINDOW_RULES: Final = Codes(WindowRule.SELF_AND_BEFORE)
