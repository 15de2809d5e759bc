"""Where prefill calls begin and end: on an absolute grid, so that warm and cold runs agree.

Kernels give other bits for other call shapes. If edges depended on where a prompt happened to
continue, a cached prefix and a fresh one would differ.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from kvpack.limits import POSITION_MAX, check_range

#: Tokens of one prefill call; edges are multiples of it.
PREFILL_CALL_TOKENS: Final = 512


def prefill_calls(start: int, end: int, call_tokens: int = PREFILL_CALL_TOKENS) -> list[int]:
    """Sizes of the calls that compute rows ``[start, end)``, edges on multiples of ``call_tokens``.

    Raises:
        LimitError: A bound is outside its cap or ``end < start``.
    """
    check_range("prefill.call_tokens", call_tokens, 1, POSITION_MAX, "tokens")
    check_range("prefill.start", start, 0, POSITION_MAX, "tokens")
    check_range("prefill.end", end, start, POSITION_MAX, "tokens")
    edges = [start, *range((start // call_tokens + 1) * call_tokens, end, call_tokens), end]
    return [after - before for before, after in pairwise(edges) if after > before]
