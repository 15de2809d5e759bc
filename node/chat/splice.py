"""Continue known token ids under a conversation that was rendered again.

Ids that were generated need not be those that their text would be encoded to. So where the new
text begins with the text of all known ids, the known ids stay as they are, and only what follows
is encoded. Everything here compares text; a byte that is no UTF-8 counts as U+FFFD, which is also
how it was shown to the client that sends it back.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

_decoder_type: Final = codecs.getincrementaldecoder("utf-8")

#: Stands in a list of lengths where a character is split over two tokens.
_INSIDE: Final = -1


class Splice(enum.Enum):
    """How much of what was known begins the new ids."""

    FRESH = "fresh"  # nothing was known
    EXACT = "exact"  # all known ids
    REWOUND = "rewound"  # their beginning; what follows was written otherwise
    FULL = "full"  # rendered from scratch: known ids are kept only as far as the ids agree


@dataclass(frozen=True, slots=True, repr=False)
class Spliced:
    """The ids of a rendered conversation.

    Attributes:
        token_ids: Their text is the rendered one.
        kept_tokens: So many of them are the known ones.
        splice: How they came about.
    """

    token_ids: tuple[int, ...]
    kept_tokens: int
    splice: Splice


class TokenTable(dict[int, bytes]):
    """Bytes of each token, asked for once; not more entries than the tokenizer has tokens.

    A context is read again with every turn: from a table a hundred thousand tokens take
    milliseconds.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._token_bytes(token_id)
        return found


@dataclass(frozen=True, slots=True)
class Codec:
    """Text to ids, and each id to bytes.

    Attributes:
        encode: Ids of a text; marks written in it become their special tokens.
        token_bytes: Bytes that a token stands for.
    """

    encode: Callable[[str], Sequence[int]]
    token_bytes: Callable[[int], bytes]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` stand for together."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def lengths(self, token_ids: Sequence[int]) -> list[int]:
        """Characters of the text after each token, -1 inside of a character; first 0 for none."""
        decoder = _decoder_type("replace")
        lengths, total = [0], 0
        for token_id in token_ids:
            total += len(decoder.decode(self.token_bytes(token_id)))
            lengths.append(_INSIDE if decoder.getstate()[0] else total)
        return lengths


def splice(known: Sequence[int], rendered: str, codec: Codec) -> Spliced:
    """The ids of ``rendered``, beginning with as many of ``known`` as its text allows.

    Args:
        known: The ids of the conversation so far.
        rendered: The whole conversation, with what comes now.
        codec: The tokenizer.
    """
    known_text = codec.text(known)
    if rendered.startswith(known_text):
        rest = codec.encode(rendered[len(known_text) :])
        if codec.text(rest) == rendered[len(known_text) :]:
            return Spliced((*known, *rest), len(known), Splice.EXACT)
    return _from_whole(known, known_text, rendered, codec)


def _from_whole(known: Sequence[int], known_text: str, rendered: str, codec: Codec) -> Spliced:
    """The splice by the ids of the whole text.

    A tokenizer may normalise what it encodes, so its own form of the text is what is compared.
    The splice lies between two tokens of both: a mark is never cut in two.
    """
    whole = codec.encode(rendered)
    whole_text = codec.text(whole)
    edges = {length: index for index, length in enumerate(codec.lengths(whole))}
    if whole_text.startswith(known_text) and len(known_text) in edges:
        rest = whole[edges[len(known_text)] :]
        return Spliced((*known, *rest), len(known), Splice.EXACT)
    lengths = codec.lengths(known)
    kept = _kept(lengths, _common(known_text, whole_text), edges)
    same = _same(known, whole)
    if kept <= same:
        return Spliced(tuple(whole), same, Splice.FULL)
    rest = whole[edges[lengths[kept]] :]
    return Spliced((*known[:kept], *rest), kept, Splice.REWOUND)


def _kept(lengths: Sequence[int], common: int, edges: dict[int, int]) -> int:
    """The most known tokens whose text is common and ends where a token of the whole does."""
    fitting = (
        index
        for index in range(len(lengths) - 1, -1, -1)
        if 0 <= lengths[index] <= common and lengths[index] in edges
    )
    return next(fitting, 0)


def _common(first: str, second: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _same(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
