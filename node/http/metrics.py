"""``GET /metrics``: for Prometheus. Waits for nothing, and answers while the model loads, too."""

from __future__ import annotations

from starlette.responses import Response

from node.http.access import Access, Answer, Call, Endpoint
from node.metrics.registry import CONTENT_TYPE


def routes() -> list[Endpoint]:
    """Of this module."""
    return [Endpoint("/metrics", "GET", Access.ADMIN, metrics)]


async def metrics(call: Call) -> Answer:
    """All counters as of now."""
    body = call.door.desk.metrics.exposition()
    return Response(body, headers={"content-type": CONTENT_TYPE, "cache-control": "no-store"})
