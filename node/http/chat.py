"""``POST /v1/chat/completions``: stateless chat, begun from the deepest state that is held."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from node.chat import transcripts
from node.chat.compose import Composed, compose
from node.chat.reply import ReplyPart, ReplyReader
from node.chat.transcripts import Terms, Transcript
from node.http import sse
from node.http.access import Access, Answer, Call, Endpoint
from node.http.answering import (
    Spelling,
    budget_of,
    json_response,
    max_tokens_of,
    new_id,
    order_of,
    reuse_body,
    spent_tokens,
    usage_body,
)
from node.http.chat_request import ChatAsk, ChatFields, chat_ask
from node.http.hangup import unless_gone
from node.http.models import check_model
from node.http.sampling import decoding_of
from node.serving.order import Finished, FinishReason, Piece, Prefilled
from node.serving.run import Run


def routes() -> list[Endpoint]:
    """Of this module. mlx_lm.server answers the second path, too."""
    return [
        Endpoint("/v1/chat/completions", "POST", Access.TENANT, chat_completions, computes=True),
        Endpoint("/chat/completions", "POST", Access.TENANT, chat_completions, computes=True),
    ]


async def chat_completions(call: Call) -> Answer:
    """An answer to a conversation, whole or as it is made."""
    ask = chat_ask(await call.json(ChatFields))
    prepared = await unless_gone(call.request.receive, _prepare(call, ask))
    chat = _Chat(call, ask, prepared)
    run = call.serving.floor.submit(prepared.order)
    if ask.fields.stream:
        return sse.EventStream(chat.events(run), closing=run.cancel)
    return json_response(await unless_gone(call.request.receive, chat.whole(run)))


@dataclass(frozen=True, slots=True, repr=False)
class _Prepared:
    """An order, and what is needed to read what comes of it."""

    composed: Composed
    terms: Terms
    order: Any
    model: str


async def _prepare(call: Call, ask: ChatAsk) -> _Prepared:
    """Everything before a slot: known ids, policy, rendering. Off the loop where it takes time."""
    serving, fields, request = call.serving, ask.fields, ask.request
    model = check_model(serving.facts, fields.model)
    max_tokens = max_tokens_of(serving, fields.max_completion_tokens, fields.max_tokens)
    binding = serving.tenants.binding(call.tenant)
    terms = Terms(binding.key, binding.identity, request.tools, request.options)
    found = await transcripts.find(serving.transcripts, terms, request.messages)
    work = functools.partial(
        compose, serving.renderer, request, budget_of(serving, max_tokens), found
    )
    composed = await asyncio.to_thread(work)
    ids = composed.prompt.token_ids
    decoding = decoding_of(fields, serving.options.answer, ids)
    order = order_of(
        serving, call.tenant, ids, decoding, max_tokens,
        top_logprobs=ask.top_logprobs, reuse=fields.cache_prompt is not False,
        ends=not fields.ignore_eos, shifted=composed.shifted,
    )  # fmt: skip
    return _Prepared(composed, terms, order, model)


class _Chat:
    """One answer as it becomes JSON."""

    def __init__(self, call: Call, ask: ChatAsk, prepared: _Prepared) -> None:
        serving = call.serving
        self._call = call
        self._ask = ask
        self._prepared = prepared
        self._spelling = Spelling(serving)
        self._ends = prepared.order.end_ids
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._reader = ReplyReader(
            serving.engine.model,
            functools.partial(new_id, "call"),
            ask.request.tools,
            in_thought=prepared.composed.prompt.in_thought,
        )
        self._calls_told = 0

    async def whole(self, run: Run) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        logprobs: list[dict[str, Any]] = []
        async with run:
            async for event in run:
                if isinstance(event, Piece):
                    self._reader.push(event.text)
                    logprobs += self._logprobs(event)
                elif isinstance(event, Finished):
                    self._reader.push(event.text)
                    self._reader.finish()
                    await self._keep(event)
                    return self._body(event, logprobs)
        raise RuntimeError("a run ended without its last event")

    async def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        """The events of an answer that is streamed."""
        async with run:
            yield self._chunk({"role": "assistant", "content": ""})
            async for event in run:
                if isinstance(event, Prefilled):
                    yield sse.comment(f"prefill {event.computed_tokens}/{event.total_tokens}")
                elif isinstance(event, Piece):
                    delta, logprobs = self._delta(self._reader.push(event.text)), None
                    if self._ask.top_logprobs is not None:
                        logprobs = self._logprobs(event)
                    if delta or logprobs:
                        yield self._chunk(delta, logprobs=logprobs)
                else:
                    for part in (self._reader.push(event.text), self._reader.finish()):
                        delta = self._delta(part)
                        if delta:
                            yield self._chunk(delta)
                    await self._keep(event)
                    yield self._chunk({}, reason=self._reason(event), finished=event)
                    if self._ask.fields.include_usage:
                        yield self._usage_chunk(event)
        yield sse.DONE

    async def _keep(self, finished: Finished) -> None:
        """Remember the exact ids under what the client will send back, and count."""
        self._call.door.quotas.spend(self._call.tenant, spent_tokens(finished.usage))
        composed, request = self._prepared.composed, self._ask.request
        await transcripts.keep(
            self._call.serving.transcripts,
            self._prepared.terms,
            (*request.messages, self._reader.message()),
            Transcript(finished.token_ids, composed.dropped_messages),
        )

    def _reason(self, finished: Finished) -> str:
        if finished.reason is FinishReason.STOP and self._reader.has_tool_calls:
            return "tool_calls"
        return finished.reason.value

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        """That of one token. The one that ended the answer is no part of it."""
        if piece.logprob is None or piece.token_id in self._ends:
            return []
        return [self._spelling.entry(piece.logprob)]

    def _body(self, finished: Finished, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        said = self._reader.message()
        message: dict[str, Any] = {"role": "assistant", "content": said.content or None}
        if said.content == "" and not said.tool_calls:
            message["content"] = ""
        if said.reasoning:
            message["reasoning"] = message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = [one.to_json() for one in said.tool_calls]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": self._reason(finished),
            "logprobs": None if self._ask.top_logprobs is None else {"content": logprobs},
        }
        return self._head("chat.completion") | {
            "choices": [choice],
            "usage": usage_body(finished.usage),
            "kvpack": self._reuse(finished),
        }

    def _delta(self, part: ReplyPart) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = part.reasoning
        if part.tool_calls:
            first = self._calls_told
            self._calls_told += len(part.tool_calls)
            delta["tool_calls"] = [
                {"index": first + index, **one.to_json()}
                for index, one in enumerate(part.tool_calls)
            ]
        return delta

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        logprobs: list[dict[str, Any]] | None = None,
        reason: str | None = None,
        finished: Finished | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        if logprobs:
            choice["logprobs"] = {"content": logprobs}
        body = self._head("chat.completion.chunk") | {"choices": [choice]}
        if finished is not None:
            body["kvpack"] = self._reuse(finished)
        return sse.event(body)

    def _usage_chunk(self, finished: Finished) -> bytes:
        head = self._head("chat.completion.chunk")
        return sse.event(head | {"choices": [], "usage": usage_body(finished.usage)})

    def _reuse(self, finished: Finished) -> dict[str, Any]:
        return reuse_body(finished.usage, self._prepared.composed.dropped_turns)

    def _head(self, kind: str) -> dict[str, Any]:
        facts = self._call.serving.facts
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._prepared.model,
            "system_fingerprint": facts.fingerprint,
        }
