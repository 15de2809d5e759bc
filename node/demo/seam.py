"""The text on both sides of the move, for a person to read across the seam.

It goes to the terminal of whoever runs the demo on a text of their own, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node.client import NodeClient

#: Characters shown on each side.
SEAM_CHARACTERS: Final = 160

#: Tokens decoded before the seam: a character has at most four bytes, a token at least one.
TAIL_TOKENS: Final = 4 * SEAM_CHARACTERS

#: What a decoder writes for bytes that are no character, or not yet one.
_NO_CHARACTER: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True, repr=False)
class Seam:
    """What was told on the source, and how the target went on.

    Attributes:
        before: The end of the prompt.
        after: The beginning of what the target generated. A character whose bytes lie on both
            sides is here, whole.
    """

    before: str
    after: str


async def read_seam(client: NodeClient, prompt: list[int], generated: list[int]) -> Seam:
    """Decode the tokens around the end of ``prompt``.

    Raises:
        KvpackError: The node did not answer.
    """
    tail = prompt[-TAIL_TOKENS:]
    return cut_seam(await client.detokenize(tail), await client.detokenize(tail + generated))


def cut_seam(tail: str, whole: str) -> Seam:
    """Cut ``whole``, which goes on from ``tail``, where the two part.

    A character that ``tail`` ends within differs from the same one in ``whole``, and so falls
    behind the cut.
    """
    pairs = enumerate(zip(tail, whole, strict=False))
    ends = min(len(tail), len(whole))
    place = next((i for i, (one, other) in pairs if one != other), ends)
    after = whole[place : place + SEAM_CHARACTERS]
    if place + SEAM_CHARACTERS >= len(whole):
        after = after.rstrip(_NO_CHARACTER)
    return Seam(whole[:place][-SEAM_CHARACTERS:].lstrip(_NO_CHARACTER), after)


def for_terminal(text: str) -> str:
    """``text`` on one line, without characters that would steer a terminal."""
    line = " ".join(text.split())
    return "".join(one if one.isprintable() else _NO_CHARACTER for one in line)
