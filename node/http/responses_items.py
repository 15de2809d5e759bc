"""Items of the Responses API and messages of a chat: the same conversation in two forms.

A message may be several items: an assistant's text and each of its tool calls is one. Each item has
an id, drawn once; it stays with the message wherever that goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from node.chat.messages import Message
from node.http.errors import ApiError, bad_request
from node.serving.said import Said, new_id

#: What a client may add in one request.
ITEMS_MAX: Final = 4096

_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = ("input_text", "output_text", "text")

JsonObject = dict[str, Any]


def said_in(given: object, param: str = "input") -> list[Said]:
    """The messages of ``input`` or ``items``: a text, or a list of items.

    What is kept of them can be written into a prompt later: each is checked as a message here.

    Raises:
        ApiError: Names the item and what is wrong with it.
        FormatError: The same, of a message's fields; also LimitError.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_request(f"{param}: expected a text or a list of items", param=param)
    if len(given) > ITEMS_MAX:
        raise bad_request(
            f"{param}: expected at most {ITEMS_MAX} items, found {len(given)}", param=param
        )
    told: list[Said] = []
    for number, item in enumerate(given):
        where = f"{param}[{number}]"
        if not isinstance(item, dict):
            raise bad_request(f"{where}: expected an object", param=where)
        _add(told, item, where)
        if told:
            Message.parse(dict(told[-1].message), where)
    return told


def items_of(told: Iterable[Said]) -> list[JsonObject]:
    """The items that these messages are, in order."""
    return [item for one in told for item in _items(one)]


def output_items(answer: Said, *, status: str = "completed") -> list[JsonObject]:
    """The items of an assistant's answer."""
    return [{**item, "status": status} for item in _items(answer)]


def without_item(one: Said, item_id: str) -> Said | None:
    """``one`` without the item of that id; None where nothing is left of it."""
    place = one.ids.index(item_id)
    ids = one.ids[:place] + one.ids[place + 1 :]
    if not ids:
        return None
    message = dict(one.message)
    first_call = len(one.ids) - len(message.get("tool_calls", ()))
    if place < first_call:
        message["content"] = ""
    else:
        calls = list(message["tool_calls"])
        del calls[place - first_call]
        message["tool_calls"] = calls
        if not calls:
            del message["tool_calls"]
    return Said(ids, message)


def answer_of(text: str, calls: Sequence[JsonObject], ids: Sequence[str] = ()) -> Said:
    """An assistant's message, as chat completions write it.

    Args:
        text: What it says.
        calls: ``{"id", "type": "function", "function": {"name", "arguments"}}`` each.
        ids: Of its items, in order, as far as they were drawn already.
    """
    message: JsonObject = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    has_text = bool(text) or not calls
    prefixes = ["msg"] * has_text + ["fc"] * len(calls)
    drawn = [ids[i] if i < len(ids) else new_id(prefix) for i, prefix in enumerate(prefixes)]
    return Said(tuple(drawn), message)


def text_part(text: str, logprobs: Sequence[JsonObject] = ()) -> JsonObject:
    """The content of an answer's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _add(told: list[Said], item: JsonObject, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        told.append(_message(item, where))
    elif kind == "function_call":
        _add_call(told, item, where)
    elif kind == "function_call_output":
        told.append(_output(item, where))
    elif kind != "reasoning":
        # Reasoning of earlier turns is left out by templates; everything else would be missed.
        raise ApiError(
            400, "unsupported_item",
            f"{where}.type: expected message, function_call or function_call_output",
            param=f"{where}.type",
        )  # fmt: skip


def _message(item: JsonObject, where: str) -> Said:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_request(f"{where}.role: expected one of {', '.join(_ROLES)}", param=where)
    content = _text(item.get("content"), f"{where}.content")
    return Said((new_id("msg"),), {"role": role, "content": content})


def _add_call(told: list[Said], item: JsonObject, where: str) -> None:
    """Tool calls in a row belong to the assistant's message before them."""
    call = {
        "id": _string(item, "call_id", where),
        "type": "function",
        "function": {
            "name": _string(item, "name", where),
            "arguments": _string(item, "arguments", where),
        },
    }
    if told and told[-1].message["role"] == "assistant":
        last = told.pop()
        calls = [*last.message.get("tool_calls", ()), call]
        told.append(Said((*last.ids, new_id("fc")), {**last.message, "tool_calls": calls}))
    else:
        told.append(answer_of("", [call]))


def _output(item: JsonObject, where: str) -> Said:
    call_id = _string(item, "call_id", where)
    content = _text(item.get("output"), f"{where}.output")
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return Said((new_id("fco"),), message)


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected a text or a list of parts", param=where)
    texts: list[str] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
            continue
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ApiError(
                400, "unsupported_content",
                f"{where}[{number}]: expected a part of text; this model takes no other",
                param=f"{where}[{number}]",
            )  # fmt: skip
        texts.append(part["text"])
    return "".join(texts)


def _string(item: JsonObject, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name}: expected a text", param=f"{where}.{name}")
    return value


def _items(one: Said) -> list[JsonObject]:
    message = one.message
    role, ids = message["role"], list(one.ids)
    if role == "tool":
        return [
            {
                "id": ids[0],
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": message["content"],
                "status": "completed",
            }
        ]
    items: list[JsonObject] = []
    calls = message.get("tool_calls", ())
    if len(ids) > len(calls):
        text = message.get("content") or ""
        part = text_part(text) if role == "assistant" else {"type": "input_text", "text": text}
        items.append(
            {
                "id": ids.pop(0),
                "type": "message",
                "role": role,
                "content": [part],
                "status": "completed",
            }
        )
    items += [_call_item(item_id, call) for item_id, call in zip(ids, calls, strict=True)]
    return items


def _call_item(item_id: str, call: Mapping[str, Any]) -> JsonObject:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": call["function"]["arguments"],
        "status": "completed",
    }
