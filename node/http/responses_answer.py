"""A response as clients read it, and the events that tell of it while it is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.chat.reply import ReplyPart
from node.http.responses_body import Asked
from node.http.responses_items import output_items, text_part
from node.serving.order import MissReason, RunUsage
from node.serving.said import Said, new_id

JsonObject = dict[str, Any]

#: The word of OpenAI's diagnostics that is nearest to ours.
_MISSES: Final[Mapping[MissReason, str]] = {
    MissReason.CONTEXT_SHIFTED: "context_compacted",
    MissReason.NUMERICS_CHANGED: "model_changed",
}


@dataclass(frozen=True, slots=True, repr=False)
class Head:
    """What of a response is known before its answer.

    Attributes:
        asked: What it answers.
        model: The model's name.
        response_id: Its own.
        created_at: Seconds since 1970.
        temperature: That is used.
        top_p: That is used.
        truncation: ``auto`` or ``disabled``.
    """

    asked: Asked
    model: str
    response_id: str
    created_at: int
    temperature: float
    top_p: float
    truncation: str

    def response(
        self,
        status: str,
        output: Sequence[JsonObject] = (),
        usage: RunUsage | None = None,
        **more: object,
    ) -> JsonObject:
        """The response object in that state."""
        body = self.asked.body
        told: JsonObject = {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "store": self.asked.stored,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **one} for one in _tools(body.tools)],
            "top_p": self.top_p,
            "top_logprobs": self.asked.top_logprobs or 0,
            "truncation": self.truncation,
            "usage": None if usage is None else usage_object(usage),
            "user": body.user,
        }
        if self.asked.conversation_id:
            told["conversation"] = {"id": self.asked.conversation_id}
        if usage is not None:
            told["prompt_cache_diagnostics"] = diagnostics(usage)
            told["kvpack"] = cache_object(usage)
        return told | more


class Telling:
    """The events of one response, in order. Each has the next sequence number."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._number = 0
        self._message: _Part | None = None
        self._thought: _Part | None = None
        self._items: list[JsonObject] = []

    def begun(self) -> Iterator[JsonObject]:
        """Before anything is computed."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._head.response("in_progress"))

    def part(self, part: ReplyPart, logprobs: Sequence[JsonObject] = ()) -> Iterator[JsonObject]:
        """More of the answer. Tool calls are told at its end."""
        if part.reasoning:
            yield from self._thinking()
            yield from self._delta(self._thought, part.reasoning)
        if part.content or (logprobs and self._message is not None):
            yield from self._thought_over()
            yield from self._saying()
            yield from self._delta(self._message, part.content, logprobs)

    def over(self, answer: Said, status: str) -> Iterator[JsonObject]:
        """The answer is whole: the rest of its items."""
        yield from self._thought_over()
        items = output_items(answer, status=status)
        if items[0]["type"] == "message":
            yield from self._saying()
            yield from self._said(items.pop(0))
        for item in items:
            yield from self._called(item)

    def ended(self, response: JsonObject) -> JsonObject:
        """The last event."""
        return self._event(f"response.{response['status']}", response=response)

    @property
    def items(self) -> list[JsonObject]:
        """What was told of, whole."""
        return list(self._items)

    @property
    def message_id(self) -> str:
        """The id that the answer's message has, or would have."""
        return "" if self._message is None else self._message.item_id

    def _event(self, kind: str, **fields: object) -> JsonObject:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _at(self, part: _Part, *, indexed: bool = True) -> JsonObject:
        where: JsonObject = {"item_id": part.item_id, "output_index": part.index}
        return where | ({"content_index": 0} if indexed else {})

    def _saying(self) -> Iterator[JsonObject]:
        if self._message is not None:
            return
        part = self._message = _Part(new_id("msg"), len(self._items), "output_text", [], [])
        item = {
            "id": part.item_id, "type": "message", "role": "assistant", "status": "in_progress",
            "content": [],
        }  # fmt: skip
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        yield self._event("response.content_part.added", **self._at(part), part=text_part(""))

    def _said(self, item: JsonObject) -> Iterator[JsonObject]:
        part = self._message
        if part is None:
            raise RuntimeError("no message was begun")
        text = "".join(part.texts)
        content = text_part(text, part.logprobs)
        plain = [_without_bytes(one) for one in part.logprobs]
        yield self._event("response.output_text.done", **self._at(part), text=text, logprobs=plain)
        yield self._event("response.content_part.done", **self._at(part), part=content)
        whole = {**item, "id": part.item_id, "content": [content]}
        yield from self._done(part.index, whole)

    def _called(self, item: JsonObject) -> Iterator[JsonObject]:
        index, where = len(self._items), {"item_id": item["id"], "output_index": len(self._items)}
        empty = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=empty)
        arguments = item["arguments"]
        kind = "response.function_call_arguments"
        yield self._event(f"{kind}.delta", **where, delta=arguments)
        yield self._event(f"{kind}.done", **where, arguments=arguments, name=item["name"])
        yield from self._done(index, item)

    def _thinking(self) -> Iterator[JsonObject]:
        if self._thought is not None:
            return
        part = self._thought = _Part(new_id("rs"), len(self._items), "reasoning_text", [], [])
        item = {"id": part.item_id, "type": "reasoning", "summary": [], "content": []}
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        empty = {"type": "reasoning_text", "text": ""}
        yield self._event("response.content_part.added", **self._at(part), part=empty)

    def _thought_over(self) -> Iterator[JsonObject]:
        part = self._thought
        if part is None or part.closed:
            return
        part.closed = True
        text = "".join(part.texts)
        content = {"type": "reasoning_text", "text": text}
        yield self._event("response.reasoning_text.done", **self._at(part), text=text)
        yield self._event("response.content_part.done", **self._at(part), part=content)
        item = {"id": part.item_id, "type": "reasoning", "summary": [], "content": [content]}
        yield from self._done(part.index, item)

    def _delta(
        self, part: _Part | None, text: str, logprobs: Sequence[JsonObject] = ()
    ) -> Iterator[JsonObject]:
        # A thought after the content has begun is left out: its item is closed by then.
        if part is None or part.closed:
            return
        part.texts.append(text)
        part.logprobs.extend(logprobs)
        fields: JsonObject = {"delta": text}
        if part.kind == "output_text":
            fields["logprobs"] = [_without_bytes(one) for one in logprobs]
        yield self._event(f"response.{part.kind}.delta", **self._at(part), **fields)

    def _done(self, index: int, item: JsonObject) -> Iterator[JsonObject]:
        self._items.append(item)
        yield self._event("response.output_item.done", output_index=index, item=item)


@dataclass(slots=True)
class _Part:
    """A text that is being told."""

    item_id: str
    index: int
    kind: str
    texts: list[str]
    logprobs: list[JsonObject]
    closed: bool = False


def replayed(response: JsonObject) -> Iterator[JsonObject]:
    """The events of a response that was made before."""
    number = 0
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "sequence_number": number, "response": begun}
        number += 1
    for index, item in enumerate(response["output"]):
        for kind in ("added", "done"):
            event = {"type": f"response.output_item.{kind}", "output_index": index, "item": item}
            yield {**event, "sequence_number": number}
            number += 1
            if kind == "added" and item["type"] == "message":
                text = item["content"][0]["text"]
                where = {"item_id": item["id"], "output_index": index, "content_index": 0}
                delta = {"delta": text, "logprobs": [], "sequence_number": number}
                yield {"type": "response.output_text.delta", **where, **delta}
                number += 1
    status = response["status"]
    yield {"type": f"response.{status}", "sequence_number": number, "response": response}


def usage_object(usage: RunUsage) -> JsonObject:
    """As OpenAI counts. What was cached changes no other number."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def diagnostics(usage: RunUsage) -> JsonObject:
    """Why not all of the prompt was held, in OpenAI's words."""
    if usage.miss is MissReason.NONE:
        return {"type": "cache_hit"}
    if usage.miss is MissReason.DISABLED:
        return {"type": "unavailable"}
    reason = _MISSES.get(usage.miss, "input_changed")
    return {
        "type": "cache_miss", "reason": reason, "cache_missed_tokens": usage.evaluated_tokens
    }  # fmt: skip


def cache_object(usage: RunUsage) -> JsonObject:
    """The same in this node's words. As with chat, ``miss`` is there where anything was missing."""
    found: JsonObject = {
        "rung": usage.rung.value,
        "evaluated_tokens": usage.evaluated_tokens,
        "restored_bytes": usage.restored_bytes,
        "fallback": usage.fallback.value,
    }
    if usage.miss is not MissReason.NONE:
        found["miss"] = usage.miss.value
    return found


def _tools(given: Sequence[Any] | None) -> list[JsonObject]:
    return [one for one in given or () if isinstance(one, dict)]


def _without_bytes(logprob: JsonObject) -> JsonObject:
    tops = [{"token": top["token"], "logprob": top["logprob"]} for top in logprob["top_logprobs"]]
    return {"token": logprob["token"], "logprob": logprob["logprob"], "top_logprobs": tops}
