"""Section 5: what a chunk of each class may hold; headers and references share these rules."""

from __future__ import annotations

import itertools
from typing import Any

from tests.reference.verdict import cap, need

FULL, SWA, TOKEN_IDS, FINAL_LOGITS, SAMPLER, DRAFT, SESSION = range(1, 8)
_POSITION = 16_777_216


def check_range(chunk: dict[str, Any], stage: str) -> None:
    """Layers, range, part and sizes of one chunk.

    Raises:
        Refused: ``malformed`` or ``over_limit``.
    """
    kind, layers = chunk["chunk_class"], chunk["layers"]
    rows = kind in (FULL, SWA) or (kind == DRAFT and len(layers) > 0)
    need(rows == (len(layers) > 0), stage, f"{len(layers)} layers for class {kind}")
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    need(ascending, stage, "layers do not ascend")
    cap(layers[-1] if layers else 0, 511, stage, "layer")
    payload = kind in (SAMPLER, DRAFT, SESSION) and not rows
    need(chunk["part"] == 0 or payload, stage, "a part of no payload")
    _check_tokens(kind, rows, chunk["first_position"], chunk["token_count"], stage)
    _check_sizes(chunk, stage)


def _check_tokens(kind: int, rows: bool, first: int, count: int, stage: str) -> None:
    cap(first, _POSITION - rows, stage, "first position")
    if rows:
        _check_block(first, count, 256, stage)
    elif kind == TOKEN_IDS:
        _check_block(first, count, 65_536, stage)
    else:
        need(count == (kind == FINAL_LOGITS), stage, f"token count {count} for class {kind}")


def _check_block(first: int, count: int, block: int, stage: str) -> None:
    need(count >= 1 and first % block + count <= block, stage, f"range not inside one {block}")


def _check_sizes(chunk: dict[str, Any], stage: str) -> None:
    plain, encoded = chunk["plain_bytes"], chunk["encoded_bytes"]
    if chunk["codec"] == 1:
        need(encoded == plain, stage, "raw bytes of another size")
    else:
        need(1 <= encoded < plain, stage, "encoded bytes are not shorter")
    if chunk["chunk_class"] == TOKEN_IDS:
        need(plain == 4 * chunk["token_count"], stage, "token ids are 4 bytes each")
