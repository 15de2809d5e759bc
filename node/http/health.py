"""``GET /health``: whether this node answers. The one route that everybody may call."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse

from node.http.access import Access, Answer, Call, Endpoint
from node.http.door import DoorState
from node.http.errors import refusal_of, unavailable
from node.serving.health import HealthState


def routes() -> list[Endpoint]:
    """Of this module."""
    return [
        Endpoint("/health", "GET", Access.PUBLIC, health),
        Endpoint("/v1/health", "GET", Access.PUBLIC, health),
    ]


async def health(call: Call) -> Answer:
    """200 ``{"status": "ok"}``, or 503 with an error that says why not."""
    door = call.door
    if door.state is DoorState.LOADING:
        return refusal_of(unavailable("loading", "the model is being loaded")).response()
    if door.state is DoorState.DRAINING:
        return refusal_of(unavailable("draining", "this node stops")).response()
    unhealthy = door.serving.floor.health
    if unhealthy.state is HealthState.UNHEALTHY:
        return refusal_of(unhealthy.unhealthy()).response()
    return JSONResponse({"status": "ok"}, HTTPStatus.OK)
