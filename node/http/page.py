"""``GET /``: the status page, its files, and the stream that keeps it fresh."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from http import HTTPStatus

from starlette.responses import Response

from node.http.access import Access, Answer, Call, Endpoint
from node.http.errors import not_found
from node.http.sse import EventStream, event
from node.page.assets import ASSETS
from node.page.document import HEADERS
from node.page.feed import StatusPage


def routes() -> list[Endpoint]:
    """Of this module."""
    return [
        Endpoint("/", "GET", Access.ADMIN, page),
        Endpoint("/page/events", "GET", Access.ADMIN, events),
        Endpoint("/page/{name}", "GET", Access.ADMIN, asset),
    ]


async def page(call: Call) -> Answer:
    """The whole page as of now."""
    headers = {**HEADERS, "content-type": "text/html; charset=utf-8", "cache-control": "no-store"}
    shown = call.door.desk.page
    await shown.refresh()
    return Response(shown.html().encode(), headers=headers)


async def asset(call: Call) -> Answer:
    """A file of the package; its address holds its digest, so a browser need not ask again."""
    found = ASSETS.get(call.request.path_params["name"])
    if found is None:
        raise not_found("no such file")
    etag = f'"{found.digest}"'
    headers = {**HEADERS, "etag": etag, "cache-control": "private, max-age=86400"}
    if call.request.headers.get("if-none-match") == etag:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(found.body, headers={**headers, "content-type": found.media_type})


async def events(call: Call) -> Answer:
    """Parts of the page as they change, by id; ends when the node stops.

    Raises:
        NodeBusyError: Too many pages are open.
    """
    shown = call.door.desk.page
    # Before the answer begins: later it could be told as an event only.
    shown.require_room()
    return EventStream(_changes(shown), headers=HEADERS)


async def _changes(shown: StatusPage) -> AsyncGenerator[bytes, None]:
    async for changed in shown.changes():
        yield event(changed)
