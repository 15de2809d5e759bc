"""``POST /v1/completions``: a text goes on, without any conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

from node.chat.policy import Refusal, plan_raw
from node.http import sse
from node.http.access import Access, Answer, Call, Endpoint
from node.http.answering import (
    Spelling,
    budget_of,
    finite,
    json_response,
    max_tokens_of,
    new_id,
    order_of,
    reuse_body,
    spent_tokens,
    usage_body,
)
from node.http.chat_request import AnswerFields, refuse_common
from node.http.errors import TOO_LONG, bad_request, unsupported
from node.http.hangup import unless_gone
from node.http.models import check_model
from node.http.sampling import decoding_of
from node.serving.order import Finished, Piece, Prefilled, RunOrder, TokenLogprob
from node.serving.run import Run
from node.serving.serving import Serving

#: Alternatives of one token: what this older interface has.
_LOGPROBS_MAX: Final = 5


def routes() -> list[Endpoint]:
    """Of this module."""
    return [Endpoint("/v1/completions", "POST", Access.TENANT, completions, computes=True)]


class CompletionFields(AnswerFields):
    """The fields of a completion."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


async def completions(call: Call) -> Answer:
    """How a text goes on, whole or as it is made."""
    fields = await call.json(CompletionFields)
    _refuse(fields)
    order = await unless_gone(call.request.receive, _prepare(call.serving, call.tenant, fields))
    completion = _Completion(call, fields, order)
    run = call.serving.floor.submit(order)
    if fields.stream:
        return sse.EventStream(completion.events(run), closing=run.cancel)
    return json_response(await unless_gone(call.request.receive, completion.whole(run)))


def _refuse(fields: CompletionFields) -> None:
    refuse_common(fields)
    if fields.echo:
        raise unsupported("echo", "the prompt is not repeated")
    if fields.suffix:
        raise unsupported("suffix", "a text goes on at its end alone")
    if fields.best_of not in (None, 1):
        raise unsupported("best_of", "expected 1")
    if fields.logprobs is not None and not 0 <= fields.logprobs <= _LOGPROBS_MAX:
        raise bad_request(
            f"logprobs: expected 0 to {_LOGPROBS_MAX}, found {fields.logprobs}",
            param="logprobs", code="invalid_value",
        )  # fmt: skip


async def _prepare(serving: Serving, tenant: str, fields: CompletionFields) -> RunOrder:
    check_model(serving.facts, fields.model)
    max_tokens = max_tokens_of(serving, fields.max_tokens)
    ids = await asyncio.to_thread(_prompt_ids, serving, fields.prompt)
    planned = plan_raw(len(ids), serving.options.keep_tokens, budget_of(serving, max_tokens))
    if isinstance(planned, Refusal):
        raise bad_request(planned.text, param="prompt", code=TOO_LONG)
    kept = planned.take(ids)
    decoding = decoding_of(fields, serving.options.answer, kept)
    return order_of(
        serving, tenant, kept, decoding, max_tokens,
        top_logprobs=fields.logprobs,
        reuse=fields.cache_prompt is not False,
        ends=not fields.ignore_eos,
    )  # fmt: skip


def _prompt_ids(serving: Serving, prompt: str | list[Any] | None) -> list[int]:
    """Ids of one prompt: its text, or the ids themselves; either may be in a list of one.

    Raises:
        ApiError: None, several, or an empty one.
    """
    one: Any = prompt
    if isinstance(one, list) and one and not isinstance(one[0], int):
        if len(one) > 1:
            raise unsupported("prompt", "expected one: each answer is a request of its own")
        one = one[0]
    if isinstance(one, str):
        one = serving.engine.model.encode(one, special_tokens=True)
    if not one or not isinstance(one, list):
        raise bad_request("prompt: expected at least one token", param="prompt")
    if not all(type(token) is int and 0 <= token < serving.facts.vocab_size for token in one):
        raise bad_request(
            f"prompt: expected token ids below {serving.facts.vocab_size}", param="prompt"
        )
    return one


@dataclass(slots=True)
class _Logprobs:
    """Logprobs in this interface's form: lists of equal length."""

    spelling: Spelling
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, logprob: TokenLogprob) -> None:
        """One token more."""
        text = self.spelling.text(logprob.token_id)
        self.tokens.append(text)
        self.token_logprobs.append(finite(logprob.logprob))
        top = {self.spelling.text(token): finite(value) for token, value in logprob.top}
        self.top_logprobs.append(top)
        self.text_offset.append(self.offset)
        self.offset += len(text)

    def take(self) -> dict[str, Any] | None:
        """What was added since the last time."""
        if not self.tokens:
            return None
        taken = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken


class _Completion:
    """One answer as it becomes JSON."""

    def __init__(self, call: Call, fields: CompletionFields, order: RunOrder) -> None:
        self._call = call
        self._fields = fields
        self._ends = order.end_ids
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._logprobs = _Logprobs(Spelling(call.serving))

    async def whole(self, run: Run) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        text: list[str] = []
        async with run:
            async for event in run:
                if isinstance(event, Piece):
                    text.append(event.text)
                    self._note(event)
                elif isinstance(event, Finished):
                    self._spend(event)
                    text.append(event.text)
                    body = self._body("".join(text), event.reason.value, self._logprobs.take())
                    body["usage"] = usage_body(event.usage)
                    return body | {"kvpack": reuse_body(event.usage)}
        raise RuntimeError("a run ended without its last event")

    async def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        """The events of an answer that is streamed."""
        async with run:
            async for event in run:
                if isinstance(event, Prefilled):
                    yield sse.comment(f"prefill {event.computed_tokens}/{event.total_tokens}")
                elif isinstance(event, Piece):
                    self._note(event)
                    logprobs = self._logprobs.take()
                    if event.text or logprobs:
                        yield sse.event(self._body(event.text, None, logprobs))
                else:
                    self._spend(event)
                    last = self._body(event.text, event.reason.value, None)
                    yield sse.event(last | {"kvpack": reuse_body(event.usage)})
                    if self._fields.include_usage:
                        usage = {"choices": [], "usage": usage_body(event.usage)}
                        yield sse.event(self._head() | usage)
        yield sse.DONE

    def _spend(self, finished: Finished) -> None:
        self._call.door.quotas.spend(self._call.tenant, spent_tokens(finished.usage))

    def _note(self, piece: Piece) -> None:
        if piece.logprob is not None and piece.token_id not in self._ends:
            self._logprobs.add(piece.logprob)

    def _body(
        self, text: str, reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}
        return self._head() | {"choices": [choice]}

    def _head(self) -> dict[str, Any]:
        facts = self._call.serving.facts
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": facts.name,
            "system_fingerprint": facts.fingerprint,
        }
