"""``/v1/responses``: answers that are kept, each a point that later ones may begin from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from starlette.responses import Response

from node.errors import SessionMovedError
from node.http import sse
from node.http.access import Access, Answer, Call, Endpoint
from node.http.errors import ApiError, Refusal
from node.http.hangup import unless_gone
from node.http.pages import page_of
from node.http.responses_answer import JsonObject, replayed
from node.http.responses_body import Asked, CreateResponse, asked_in
from node.http.responses_run import Primed, Responding
from node.http.retries import REPLAYED, RetryKey, one_request, refusals, retry_key

#: 421: this node is not the one to ask.
_MISDIRECTED = 421


def routes() -> list[Endpoint]:
    """Of this module."""
    one = "/v1/responses/{response_id}"
    return [
        Endpoint("/v1/responses", "POST", Access.TENANT, create, computes=True),
        Endpoint(one, "GET", Access.TENANT, retrieve),
        Endpoint(one, "DELETE", Access.TENANT, delete),
        Endpoint(f"{one}/cancel", "POST", Access.TENANT, cancel),
        Endpoint(f"{one}/input_items", "GET", Access.TENANT, input_items),
    ]


async def create(call: Call) -> Answer:
    """Make a response."""
    body = await call.json(CreateResponse)
    asked = await asyncio.to_thread(asked_in, body)
    events = _events(call, asked)
    if asked.streams:
        # Up to the first event an error is an answer of its own, with a status.
        return sse.EventStream(Primed(await anext(events), events), _error_event)
    return await unless_gone(call.request.receive, _whole(call, asked))


async def retrieve(call: Call) -> Answer:
    """A stored one."""
    record = await call.serving.records.response(call.tenant, _id(call))
    return _json(record.body)


async def delete(call: Call) -> Answer:
    """Forget one. What began from it stays."""
    response_id = _id(call)
    await call.serving.records.delete_response(call.tenant, response_id)
    told = {"id": response_id, "object": "response", "deleted": True}
    return _json(msgspec.json.encode(told))


async def cancel(call: Call) -> Answer:
    """Nothing runs in the background here."""
    await call.serving.records.response(call.tenant, _id(call))
    raise ApiError(400, "not_in_background", "only responses in the background can be cancelled")


async def input_items(call: Call) -> Answer:
    """What a stored one was asked."""
    record = await call.serving.records.response(call.tenant, _id(call))
    items = msgspec.json.decode(record.input_items)
    return _json(msgspec.json.encode(page_of(items, call.request.query_params)))


@contextlib.contextmanager
def told_where(call: Call) -> Any:  # noqa: ANN401 - a context manager
    """Name the owner of a conversation that is another node's.

    Raises:
        ApiError: 421, with the owner in ``x-kvpack-node`` and, if known, ``x-kvpack-address``.
    """
    try:
        with refusals():
            yield
    except SessionMovedError as error:
        headers = {"x-kvpack-node": error.owner, "x-kvpack-address": error.address}
        headers = {name: value for name, value in headers.items() if value}
        raise ApiError(_MISDIRECTED, error.reason, str(error), headers=headers) from error


async def _retry(call: Call, asked: Asked) -> RetryKey | None:
    """How an answer is told makes no other request of it."""
    return await retry_key(call, msgspec.structs.replace(asked.body, stream=None))


async def _whole(call: Call, asked: Asked) -> Response:
    retry = await _retry(call, asked)
    async with one_request(call, retry) as before:
        if before is not None:
            return _json(before.body, REPLAYED)
        response: JsonObject = {}
        with told_where(call):
            async for event in Responding(call, asked, retry).events():
                response = event.get("response", response)
        return _json(msgspec.json.encode(response))


async def _events(call: Call, asked: Asked) -> AsyncGenerator[bytes, None]:
    retry = await _retry(call, asked)
    async with one_request(call, retry) as before:
        if before is not None:
            for told in _named(replayed(msgspec.json.decode(before.body))):
                yield told
            return
        with told_where(call):
            async with contextlib.aclosing(Responding(call, asked, retry).events()) as events:
                async for event in events:
                    yield sse.event(event, event["type"])


def _named(events: Iterable[JsonObject]) -> Iterable[bytes]:
    return (sse.event(event, event["type"]) for event in events)


def _error_event(refusal: Refusal) -> bytes:
    """An error for which no response could be failed."""
    error = refusal.body["error"]
    body = {"type": "error", **{name: error[name] for name in ("code", "message", "param")}}
    return sse.event(body | {"sequence_number": 0}, "error")


def _id(call: Call) -> str:
    return str(call.request.path_params["response_id"])


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, 200, headers, "application/json")
