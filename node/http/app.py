"""Routes, door and error bodies, put together as one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from node.http.access import Endpoint
from node.http.door import Door, Guarded
from node.http.errors import ApiError, broken, refusal_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def make_app(door: Door, endpoints: Sequence[Endpoint]) -> ASGIApp:
    """The application that answers ``endpoints`` behind ``door``."""
    middleware = []
    if door.options.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(door.options.allowed_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    app = Starlette(
        routes=[Route(e.path, Guarded(door, e), methods=[e.method]) for e in endpoints],
        middleware=middleware,
        exception_handlers={HTTPException: _no_route, Exception: _failed},
    )
    # A path with a slash too many is another path; nobody is sent elsewhere with its key.
    app.router.redirect_slashes = False
    return app


async def _no_route(_request: Request, error: Exception) -> Response:
    """404 and 405 of the router; which path was asked for is not repeated."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    code, message = "unknown_route", "no such route"
    if status == 405:
        code, message = "method_not_allowed", "this route has no such method"
    return refusal_of(ApiError(status, code, message, headers=headers)).response()


async def _failed(_request: Request, _error: Exception) -> Response:
    return broken().response()
