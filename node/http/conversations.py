"""``/v1/conversations``: a handle with one owner, which moves between nodes under the same id."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

import msgspec
from starlette.responses import Response

from node.http.access import Access, Answer, Call, Endpoint
from node.http.errors import bad_request, not_found
from node.http.pages import page_of
from node.http.responses import told_where
from node.http.responses_body import check_metadata
from node.http.responses_items import items_of, said_in, without_item
from node.http.retries import REPLAYED, one_request, retry_key
from node.records import ConversationRecord, Turn
from node.serving.conversations import said_by, with_messages
from node.serving.said import Said

#: Items that a client may add in one request, as OpenAI has it.
ITEMS_MAX: Final = 20


class MakeConversation(msgspec.Struct):
    """What ``POST /v1/conversations`` reads."""

    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


class ChangeConversation(msgspec.Struct):
    """What ``POST /v1/conversations/{id}`` reads."""

    metadata: dict[str, str] | None = None
    expected_revision: int | None = None


class AddItems(msgspec.Struct):
    """What ``POST /v1/conversations/{id}/items`` reads."""

    items: list[Any] | None = None
    expected_revision: int | None = None


def routes() -> list[Endpoint]:
    """Of this module."""
    one = "/v1/conversations/{conversation_id}"
    items, item = f"{one}/items", f"{one}/items/{{item_id}}"
    return [
        Endpoint("/v1/conversations", "POST", Access.TENANT, create),
        Endpoint(one, "GET", Access.TENANT, retrieve),
        Endpoint(one, "POST", Access.TENANT, update),
        Endpoint(one, "DELETE", Access.TENANT, delete),
        Endpoint(items, "GET", Access.TENANT, list_items),
        Endpoint(items, "POST", Access.TENANT, add_items),
        Endpoint(item, "GET", Access.TENANT, get_item),
        Endpoint(item, "DELETE", Access.TENANT, delete_item),
    ]


async def create(call: Call) -> Answer:
    """Begin one."""
    body = await call.json(MakeConversation)
    metadata, said = check_metadata(body.metadata), _said(body.items or [])
    retry = await retry_key(call, body)
    async with one_request(call, retry) as before:
        if before is not None:
            return _json(before.body, REPLAYED)
        conversations = call.serving.conversations
        record = await conversations.create(call.tenant, said, msgspec.json.encode(metadata))
        told = msgspec.json.encode(_object(record))
        if retry is not None:
            # Not with the record: after a crash before its session was claimed, a retry would be
            # told of a conversation that nobody can use. So it makes another one.
            await call.serving.records.commit(Turn(call.tenant, answer=retry.answer(told)))
        return _json(told)


async def retrieve(call: Call) -> Answer:
    """As it stands."""
    with told_where(call):
        return _told(await call.serving.conversations.read(call.tenant, _id(call)))


async def update(call: Call) -> Answer:
    """Give it other metadata."""
    body = await call.json(ChangeConversation)
    metadata = msgspec.json.encode(check_metadata(body.metadata))
    with told_where(call):
        conversations = call.serving.conversations
        async with conversations.writing(call.tenant, _id(call), body.expected_revision) as writing:
            changed = dataclasses.replace(writing.record, metadata=metadata)
            return _told(
                await conversations.commit(writing, Turn(call.tenant, conversation=changed))
            )


async def delete(call: Call) -> Answer:
    """End it for ever."""
    with told_where(call):
        await call.serving.conversations.delete(call.tenant, _id(call))
    told = {"id": _id(call), "object": "conversation.deleted", "deleted": True}
    return _json(msgspec.json.encode(told))


async def list_items(call: Call) -> Answer:
    """What was said, in pieces; the newest first, unless asked otherwise."""
    with told_where(call):
        record = await call.serving.conversations.read(call.tenant, _id(call))
    return _json(await asyncio.to_thread(_page, record, dict(call.request.query_params)))


async def get_item(call: Call) -> Answer:
    """One of them."""
    with told_where(call):
        record = await call.serving.conversations.read(call.tenant, _id(call))
    for item in await asyncio.to_thread(_items, record):
        if item["id"] == call.request.path_params["item_id"]:
            return _json(msgspec.json.encode(item))
    raise not_found("item: not found", param="item_id")


async def add_items(call: Call) -> Answer:
    """Say something in it without an answer."""
    body = await call.json(AddItems)
    said = _said(body.items or [])
    if not said:
        raise bad_request("items: expected at least one", param="items")
    retry = await retry_key(call, body)
    with told_where(call):
        async with one_request(call, retry) as before:
            if before is not None:
                return _json(before.body, REPLAYED)
            conversations = call.serving.conversations
            async with conversations.writing(
                call.tenant, _id(call), body.expected_revision
            ) as writing:
                context = with_messages(writing.record.context, said)
                changed = dataclasses.replace(writing.record, context=context)
                told = msgspec.json.encode(_listed(said))
                answer = None if retry is None else retry.answer(told)
                turn = Turn(call.tenant, conversation=changed, answer=answer)
                await conversations.commit(writing, turn)
                return _json(told)


async def delete_item(call: Call) -> Answer:
    """Take something back. What followed it stays, and is computed anew with the next answer."""
    item_id = call.request.path_params["item_id"]
    with told_where(call):
        conversations = call.serving.conversations
        async with conversations.writing(call.tenant, _id(call)) as writing:
            changed = await asyncio.to_thread(_without, writing.record, item_id)
            turn = Turn(call.tenant, conversation=changed)
            return _told(await conversations.commit(writing, turn))


def _items(record: ConversationRecord) -> list[dict[str, Any]]:
    return items_of(said_by(record.context))


def _page(record: ConversationRecord, query: dict[str, str]) -> bytes:
    return msgspec.json.encode(page_of(_items(record), query))


def _without(record: ConversationRecord, item_id: str) -> ConversationRecord:
    context, said = record.context, said_by(record.context)
    for index, one in enumerate(said):
        if item_id not in one.ids:
            continue
        left = without_item(one, item_id)
        new = () if left is None else (left.encode(),)
        messages = (*context.messages[:index], *new, *context.messages[index + 1 :])
        gone = 1 - len(new)
        changed = dataclasses.replace(
            context,
            messages=messages,
            lead=context.lead - gone * (index < context.lead),
            kept_from=context.kept_from - gone * (index < context.kept_from),
        )
        return dataclasses.replace(record, context=changed)
    raise not_found("item: not found", param="item_id")


def _said(items: list[Any]) -> list[Said]:
    if len(items) > ITEMS_MAX:
        raise bad_request(f"items: expected at most {ITEMS_MAX}, found {len(items)}", param="items")
    return said_in(items, "items")


def _listed(said: list[Said]) -> dict[str, Any]:
    items = items_of(said)
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"],
        "last_id": items[-1]["id"],
        "has_more": False,
    }


def _object(record: ConversationRecord) -> dict[str, Any]:
    return {
        "id": record.conversation_id,
        "object": "conversation",
        "created_at": record.created_at,
        "metadata": msgspec.json.decode(record.metadata),
        "revision": record.revision,
        "context_epoch": record.context_epoch,
    }


def _told(record: ConversationRecord) -> Response:
    return _json(msgspec.json.encode(_object(record)))


def _id(call: Call) -> str:
    return str(call.request.path_params["conversation_id"])


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, 200, headers, "application/json")
