"""Making one response: from what is known, through the slots, to what is remembered of it.

All of it is one generator of events. Before the first event an error is an answer of its own; a
client that goes away closes the generator, which frees the slot and the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvpack.errors import KvpackError
from node.chat.compose import ChatRequest, Composed, compose_next
from node.chat.messages import Message, Role
from node.chat.policy import Policy
from node.chat.render import Known
from node.chat.reply import ReplyReader
from node.http.access import Call
from node.http.answering import Spelling, budget_of, max_tokens_of, order_of, spent_tokens
from node.http.errors import ApiError, refusal_of
from node.http.models import check_model
from node.http.responses_answer import Head, JsonObject, Telling
from node.http.responses_body import Asked
from node.http.responses_items import items_of
from node.http.retries import RetryKey
from node.http.sampling import decoding_of
from node.records import Context, RecordMissingError, ResponseRecord, Turn
from node.serving.conversations import Writing, with_messages
from node.serving.order import (
    Finished,
    FinishReason,
    Piece,
    RunOrder,
    RunUsage,
    SessionRef,
)
from node.serving.said import Said, new_id

if TYPE_CHECKING:
    from node.serving.serving import Serving

_PREVIOUS = "previous_response_id"


class Responding:
    """One response in the making."""

    def __init__(self, call: Call, asked: Asked, retry: RetryKey | None) -> None:
        serving = call.serving
        self._call = call
        self._asked = asked
        self._retry = retry
        self._policy = _policy(asked, serving)
        self._max_tokens = max_tokens_of(serving, asked.body.max_output_tokens)
        answer = serving.options.answer
        body = asked.body
        self._head = Head(
            asked, check_model(serving.facts, body.model), new_id("resp"), serving.records.now(),
            answer.temperature if body.temperature is None else body.temperature,
            answer.top_p if body.top_p is None else body.top_p,
            "auto" if self._policy is Policy.SHIFT else "disabled",
        )  # fmt: skip
        self._spelling = Spelling(serving)
        self._writing: Writing | None = None

    @property
    def _serving(self) -> Serving:
        return self._call.serving

    async def events(self) -> AsyncGenerator[JsonObject, None]:
        """What is told of it.

        Raises:
            KvpackError: It cannot be made; once an event was given, only where nobody streams.
        """
        async with contextlib.AsyncExitStack() as stack:
            context = await self._begin(stack)
            composed = await asyncio.to_thread(self._composed, context)
            order = await self._order(composed)
            run = await stack.enter_async_context(self._serving.floor.submit(order))
            telling = Telling(self._head)
            for event in telling.begun():
                yield event
            try:
                async for event in self._answer(run, context, composed, telling):
                    yield event
            except KvpackError as error:
                if not self._asked.streams:
                    raise
                yield telling.ended(self._failed(error))

    async def _begin(self, stack: contextlib.AsyncExitStack) -> Context:
        """The conversation that it goes on from."""
        asked, tenant = self._asked, self._call.tenant
        if asked.conversation_id:
            writing = await stack.enter_async_context(
                self._serving.conversations.writing(
                    tenant, asked.conversation_id, asked.body.expected_revision
                )
            )
            self._writing = writing
            return writing.record.context
        if not asked.previous_id:
            return Context()
        try:
            return (await self._serving.records.response(tenant, asked.previous_id)).context
        except RecordMissingError:
            raise ApiError(
                404, "previous_response_not_found",
                f"Previous response with id '{asked.previous_id[:64]}' not found.", param=_PREVIOUS,
            ) from None  # fmt: skip

    def _composed(self, context: Context) -> Composed:
        """The prompt. Known tokens stay as far as other instructions or tools leave the text.

        Takes time in proportion to the conversation: runs on a worker thread.
        """
        asked = self._asked
        before = _messages([Said.decode(one) for one in context.kept], "messages")
        if asked.instructions:
            before = (Message(Role.SYSTEM, asked.instructions), *before)
        request = ChatRequest(_messages(asked.said, "input"), asked.tools)
        budget = budget_of(self._serving, self._max_tokens, self._policy)
        known = Known(before, self._own_ids(context))
        return compose_next(self._serving.renderer, known, request, budget)

    def _own_ids(self, context: Context) -> tuple[int, ...]:
        """The known tokens; none where they are a model's that was in the folder before."""
        ids = context.token_ids
        return ids if max(ids, default=0) < self._serving.facts.vocab_size else ()

    async def _order(self, composed: Composed) -> RunOrder:
        serving, ids = self._serving, composed.prompt.token_ids
        order = order_of(
            serving, self._call.tenant, ids,
            decoding_of(self._asked.body, serving.options.answer, ids),
            self._max_tokens, top_logprobs=self._asked.top_logprobs,
            shifted=composed.shifted,
        )  # fmt: skip
        if self._writing is None:
            return order
        return dataclasses.replace(order, session=await self._session_ref(self._writing, ids))

    async def _session_ref(self, writing: Writing, ids: tuple[int, ...]) -> SessionRef:
        """How the conversation's session goes on: as it is, or rebuilt."""
        session = writing.session
        async with self._serving.sessions.hold(session.session_id, session.token) as held:
            # Also where no row is there: one that begins, or whose rows were not brought back.
            known = held.token_ids
            goes_on = known == list(ids[: len(known)]) or held.holds_beginning_of(ids)
            return SessionRef(held.session_id, held.token, rebuild=not goes_on)

    async def _answer(
        self, run: AsyncIterator[object], context: Context, composed: Composed, telling: Telling
    ) -> AsyncIterator[JsonObject]:
        model = self._serving.engine.model
        reader = ReplyReader(
            model, lambda: new_id("call"), self._asked.tools, in_thought=composed.prompt.in_thought
        )
        finished: Finished | None = None
        async for event in run:
            if isinstance(event, Piece):
                for told in telling.part(reader.push(event.text), self._logprobs(event)):
                    yield told
            elif isinstance(event, Finished):
                finished = event
        if finished is None:
            raise RuntimeError("an answer without an end")
        for last in (reader.push(finished.text), reader.finish()):
            for told in telling.part(last):
                yield told
        whole = finished.reason is FinishReason.STOP
        status = "completed" if whole else "incomplete"
        answer = said_answer(reader.message(), telling.message_id)
        for told in telling.over(answer, status):
            yield told
        answer = with_told_ids(answer, telling)
        self._call.door.quotas.spend(self._call.tenant, spent_tokens(finished.usage))
        response = self._response(status, telling, finished.usage)
        await self._remember(response, answer, context, composed, finished)
        yield telling.ended(response)

    def _response(self, status: str, telling: Telling, usage: RunUsage) -> JsonObject:
        more: JsonObject = {"completed_at": self._serving.records.now()}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._writing is not None:
            revision = self._writing.record.revision + 1
            more["conversation"] = {"id": self._asked.conversation_id, "revision": revision}
        return self._head.response(status, telling.items, usage, **more)

    async def _remember(
        self,
        response: JsonObject,
        answer: Said,
        context: Context,
        composed: Composed,
        finished: Finished,
    ) -> None:
        """Make all of it true at once. What is not stored leaves nothing."""
        asked, records = self._asked, self._serving.records
        whole = with_messages(context, (*asked.said, answer))
        after = dataclasses.replace(
            whole,
            kept_from=whole.kept_from + composed.dropped_messages,
            token_ids=finished.token_ids,
        )
        body = msgspec.json.encode(response)
        record = ResponseRecord(
            self._call.tenant, self._head.response_id, self._head.created_at, body,
            msgspec.json.encode(items_of(asked.said)), after,
        )  # fmt: skip
        # A conversation keeps its text anyway; else what is not stored is not told again either.
        kept = asked.stored or self._writing is not None
        told = self._retry.answer(body) if self._retry is not None and kept else None
        turn = Turn(
            self._call.tenant, record if asked.stored else None, asked.previous_id, answer=told
        )
        if self._writing is not None:
            changed = dataclasses.replace(self._writing.record, context=after)
            turn = dataclasses.replace(turn, conversation=changed)
            await self._serving.conversations.commit(self._writing, turn)
        elif asked.stored:
            await records.commit(turn)

    def _failed(self, error: KvpackError) -> JsonObject:
        said = refusal_of(error).body["error"]
        code = "rate_limit_exceeded" if said["type"] == "rate_limit_error" else "server_error"
        told = {"code": code, "message": said["message"], "reason": said["code"]}
        return self._head.response("failed", error=told)

    def _logprobs(self, piece: Piece) -> list[JsonObject]:
        """That of one token. The one that ended the answer is no part of it."""
        ends = self._serving.engine.model.end_token_ids
        if piece.logprob is None or piece.token_id in ends:
            return []
        return [self._spelling.entry(piece.logprob)]


class Primed(AsyncGenerator[bytes, None]):
    """A generator whose first value is here: closing it always reaches what it holds."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first: bytes | None = first
        self._rest = rest

    async def asend(self, value: None) -> bytes:
        """The next value."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await self._rest.asend(value)

    async def athrow(self, *raised: Any) -> bytes:  # noqa: ANN401 - as the base class has it
        """Raise inside of it."""
        return await self._rest.athrow(*raised)

    async def aclose(self) -> None:
        """End it."""
        await self._rest.aclose()


def _messages(said: Sequence[Said], field: str) -> tuple[Message, ...]:
    return tuple(Message.parse(dict(one.message), f"{field}[{i}]") for i, one in enumerate(said))


def said_answer(message: Message, message_id: str) -> Said:
    """The answer, its items numbered anew but for the message that was told of already."""
    has_text = bool(message.content) or bool(message_id) or not message.tool_calls
    ids = [message_id or new_id("msg")] if has_text else []
    ids += [new_id("fc") for _ in message.tool_calls]
    return Said(tuple(ids), message.to_json())


def with_told_ids(answer: Said, telling: Telling) -> Said:
    """``answer`` by the ids that were told: a message without text got its own in the end."""
    told = tuple(item["id"] for item in telling.items if item["type"] != "reasoning")
    return dataclasses.replace(answer, ids=told)


def _policy(asked: Asked, serving: Serving) -> Policy:
    if asked.body.truncation is None:
        return Policy(serving.options.context_policy.value)
    return Policy.SHIFT if asked.body.truncation == "auto" else Policy.ERROR
