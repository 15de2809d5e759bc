"""Lists in pieces, as OpenAI's clients walk through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from node.http.errors import bad_request

LIMIT_DEFAULT: Final = 20
LIMIT_MAX: Final = 100


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of ``items``, which are in order of age: ``limit``, ``order`` and ``after``.

    Raises:
        ApiError: Names the parameter.
    """
    given = query.get("limit", str(LIMIT_DEFAULT))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 4 else 0
    if not 1 <= limit <= LIMIT_MAX:
        raise bad_request(f"limit: expected 1 to {LIMIT_MAX}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order: expected asc or desc", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise bad_request("after: no such item", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }
