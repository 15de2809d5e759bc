"""``GET /kvpack/economics``: what cuts took to compute here and to be brought back here."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse

from node.economics.values import CutCost
from node.http.access import Access, Answer, Call, Endpoint


def routes() -> list[Endpoint]:
    """Of this module."""
    return [Endpoint("/kvpack/economics", "GET", Access.ADMIN, economics)]


async def economics(call: Call) -> Answer:
    """All that was measured. A node that keeps no rows has measured nothing."""
    ladder = call.serving.ladder
    book = None if ladder is None else ladder.book
    costs = () if book is None else await asyncio.to_thread(book.read)
    body = {"object": "kvpack.economics", "cuts": [cut_object(cost) for cost in costs]}
    return JSONResponse(body, headers={"cache-control": "no-store"})


def cut_object(cost: CutCost) -> dict[str, Any]:
    """One cut; ``null`` is what was not measured."""
    prefill = cost.prefill
    return {
        "cut": cost.cut_id.hex(),
        "tokens": cost.tokens,
        "state_bytes": cost.state_bytes,
        "prefill": None if prefill is None else {
            "computed_tokens": prefill.computed_tokens,
            "wall_s": round(prefill.wall_s, 6),
            "engine_s": round(prefill.engine_s, 6),
        },
        "restores": [
            {
                "tier": restored.tier.value,
                "count": len(restored.seconds),
                "median_s": round(restored.median_s, 6),
                "of_prefill": cost.ratio(restored),
            }
            for restored in cost.restores
        ],
    }  # fmt: skip
