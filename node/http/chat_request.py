"""What ``POST /v1/chat/completions`` asks for: read, and checked for what would change the answer.

A field that this node does not know and that is not listed here changes nothing, and is ignored:
clients send many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from node.chat.compose import ChatRequest
from node.chat.messages import parse_messages
from node.chat.tools import parse_tools
from node.http.errors import bad_request, unsupported
from node.http.sampling import Sampling
from node.serving.order import TOP_LOGPROBS_MAX


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None


class AnswerFields(Sampling):
    """The fields that chat and completions have in common, beside those of sampling."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    cache_prompt: bool | None = None
    ignore_eos: bool | None = None
    adapters: str | None = None
    xtc_probability: float | None = None
    response_format: Any = None
    grammar: Any = None
    json_schema: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream says what it took."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatFields(AnswerFields):
    """The fields of chat."""

    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    role_mapping: Any = None


#: mlx_lm.server's clients write -1 for "none".
_NO_TOP: Final = -1


@dataclass(frozen=True, slots=True, repr=False)
class ChatAsk:
    """A request that can be answered.

    Attributes:
        fields: As they were sent.
        request: The conversation.
        top_logprobs: Alternatives to report for each token; None: no logprobs.
    """

    fields: ChatFields
    request: ChatRequest
    top_logprobs: int | None


def chat_ask(fields: ChatFields) -> ChatAsk:
    """The request, if all of it can be done.

    Raises:
        ApiError: Names the field.
        FormatError: Messages or tools are not as they have to be; also LimitError.
    """
    refuse_common(fields)
    _refuse_chat(fields)
    if fields.messages is None:
        raise bad_request("messages: missing", param="messages")
    tools = () if fields.tool_choice == "none" else parse_tools(fields.tools)
    request = ChatRequest(parse_messages(fields.messages), tools, fields.chat_template_kwargs or {})
    return ChatAsk(fields, request, _top_logprobs(fields))


def refuse_common(fields: AnswerFields) -> None:
    """Refuse what would change an answer and cannot be done, for chat and completions.

    Raises:
        ApiError: Names the field.
    """
    if fields.n not in (None, 1):
        raise unsupported("n", "expected 1: each answer is a request of its own")
    if fields.adapters is not None:
        raise unsupported("adapters", "this node serves its model without any")
    if fields.xtc_probability:
        raise unsupported("xtc_probability", "expected 0")
    form = fields.response_format
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise unsupported("response_format", "expected text: answers follow no schema")
    for name in ("grammar", "json_schema"):
        if getattr(fields, name) is not None:
            raise unsupported(name, "answers follow no schema")


def _refuse_chat(fields: ChatFields) -> None:
    for name in ("functions", "function_call"):
        if getattr(fields, name) is not None:
            raise unsupported(name, "use tools and tool_choice")
    if fields.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "expected auto or none: the model decides")
    if fields.tools and fields.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "the model decides how many tools it calls")
    if fields.modalities not in (None, [], ["text"]) or fields.audio is not None:
        raise unsupported("modalities", "expected text")
    if fields.web_search_options is not None:
        raise unsupported("web_search_options", "this node searches nothing")
    if fields.reasoning_effort is not None:
        raise unsupported("reasoning_effort", "chat_template_kwargs says such things to a template")
    if fields.verbosity not in (None, "medium"):
        raise unsupported("verbosity", "the model decides how long it answers")
    if fields.role_mapping is not None:
        raise unsupported("role_mapping", "the model's chat template decides")


def _top_logprobs(fields: ChatFields) -> int | None:
    top = None if fields.top_logprobs == _NO_TOP else fields.top_logprobs
    if not fields.logprobs:
        if top:
            raise bad_request(
                "top_logprobs: needs logprobs", param="top_logprobs", code="invalid_value"
            )
        return None
    if top is not None and not 0 <= top <= TOP_LOGPROBS_MAX:
        raise bad_request(
            f"top_logprobs: expected 0 to {TOP_LOGPROBS_MAX}, found {top}",
            param="top_logprobs", code="invalid_value",
        )  # fmt: skip
    return top or 0
