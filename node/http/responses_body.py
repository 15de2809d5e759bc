"""What ``POST /v1/responses`` asks for: read, and checked for what would change the answer.

A field that this node does not know changes nothing and is ignored, except those listed here: they
would change what is answered, so they are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from node.chat.tools import Tools, parse_tools
from node.http.errors import bad_request, unsupported
from node.http.responses_items import said_in
from node.http.sampling import Sampling
from node.serving.order import TOP_LOGPROBS_MAX
from node.serving.said import Said

_METADATA_PAIRS_MAX: Final = 16
_METADATA_KEY_MAX: Final = 64
_METADATA_VALUE_MAX: Final = 512

#: What ``include`` may name: the first is given, the second is never there to be given.
_LOGPROBS: Final = "message.output_text.logprobs"
_NOTHING_TO_INCLUDE: Final = ("reasoning.encrypted_content",)


class ConversationName(msgspec.Struct):
    """``conversation`` in its longer form."""

    id: str


class CreateResponse(Sampling):
    """The fields that are read, beside those of sampling."""

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    expected_revision: int | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    context_management: Any = None
    moderation: Any = None
    prompt: Any = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Asked:
    """A request that can be answered.

    Attributes:
        body: As it was sent.
        said: What is new in it.
        tools: What the model may call.
        conversation_id: Which conversation it goes on in; empty: none.
        top_logprobs: Alternatives to report for each token; None: no logprobs.
    """

    body: CreateResponse
    said: tuple[Said, ...]
    tools: Tools
    conversation_id: str
    top_logprobs: int | None

    @property
    def previous_id(self) -> str:
        """The response that it goes on from; empty: none."""
        return self.body.previous_response_id or ""

    @property
    def instructions(self) -> str:
        """The system text of this answer alone."""
        return self.body.instructions or ""

    @property
    def stored(self) -> bool:
        """Whether the answer is kept."""
        return self.body.store is not False

    @property
    def streams(self) -> bool:
        """Whether the answer is given as it is made."""
        return bool(self.body.stream)


def asked_in(body: CreateResponse) -> Asked:
    """The request, if all of it can be done.

    Raises:
        ApiError: Names the field.
        FormatError: ``tools`` are not described as they have to be; also LimitError.
    """
    _refuse_unknown(body)
    conversation = body.conversation
    name = conversation.id if isinstance(conversation, ConversationName) else conversation or ""
    if name and body.previous_response_id:
        raise bad_request(
            "previous_response_id: not together with conversation", param="previous_response_id"
        )
    if body.expected_revision is not None and not name:
        raise bad_request(
            "expected_revision: only together with conversation", param="expected_revision"
        )
    if body.input is None:
        raise bad_request("input: missing", param="input")
    said = tuple(said_in(body.input))
    if not said:
        raise bad_request("input: expected at least one item", param="input")
    check_metadata(body.metadata)
    tools = parse_tools(body.tools) if body.tool_choice != "none" else ()
    return Asked(body, said, tools, name, _top_logprobs(body))


def check_metadata(metadata: dict[str, str] | None) -> dict[str, str]:
    """``metadata``, if it may be kept: up to 16 short pairs.

    Raises:
        ApiError: It may not.
    """
    metadata = metadata or {}
    if len(metadata) > _METADATA_PAIRS_MAX:
        raise bad_request(
            f"metadata: expected at most {_METADATA_PAIRS_MAX} pairs, found {len(metadata)}",
            param="metadata",
        )
    for key, value in metadata.items():
        if not 1 <= len(key) <= _METADATA_KEY_MAX or len(value) > _METADATA_VALUE_MAX:
            raise bad_request(
                f"metadata: expected keys of 1 to {_METADATA_KEY_MAX} and values of up to "
                f"{_METADATA_VALUE_MAX} characters",
                param="metadata",
            )
    return metadata


def _refuse_unknown(body: CreateResponse) -> None:
    if body.background:
        raise unsupported("background", "answers are made while the client waits")
    if body.context_management:
        raise unsupported("context_management", "use truncation: auto or disabled")
    if body.prompt is not None:
        raise unsupported("prompt", "this node keeps no prompt templates")
    if body.moderation is not None:
        raise unsupported("moderation", "this node moderates nothing")
    if body.reasoning and body.reasoning.get("effort") not in (None, "none"):
        raise unsupported("reasoning.effort", "this model thinks as its template says")
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "expected auto or none")
    if body.tools and body.parallel_tool_calls is False:
        raise unsupported("parallel_tool_calls", "the model decides how many tools it calls")
    _check_text(body.text or {})
    for name in body.include or ():
        if name != _LOGPROBS and name not in _NOTHING_TO_INCLUDE:
            raise unsupported("include", f"expected {_LOGPROBS}")


def _check_text(text: dict[str, Any]) -> None:
    form = text.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise unsupported("text.format", "expected text: answers follow no schema")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", "the model decides how long it answers")


def _top_logprobs(body: CreateResponse) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= TOP_LOGPROBS_MAX:
        raise bad_request(
            f"top_logprobs: expected 0 to {TOP_LOGPROBS_MAX}, found {top}",
            param="top_logprobs",
            code="invalid_value",
        )
    if top:
        return top
    return 0 if _LOGPROBS in (body.include or ()) else None
