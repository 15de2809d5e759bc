"""From a request's messages to the prompt that is computed: policy, known ids, rendering.

This takes time in proportion to the conversation, so it belongs on a worker thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, overload

from engine import ChatTemplateError
from node.chat.messages import Messages
from node.chat.policy import Budget, Plan, Refusal, plan
from node.chat.render import Known, Prompt, Renderer
from node.chat.tools import Tool
from node.chat.transcripts import Found, known_of
from node.chat.turns import Conversation
from node.errors import ContextLengthError

#: No encoder needs so many times as many tokens for a text as a model did that generated it.
_FEW: Final = 2


@dataclass(frozen=True, slots=True, repr=False)
class ChatRequest:
    """A conversation that an answer is asked for.

    Attributes:
        messages: All of it, the newest last.
        tools: What the model may call.
        options: More arguments for the template.
    """

    messages: Messages
    tools: tuple[Tool, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, repr=False)
class Composed:
    """What is computed, and what of the request that is.

    Attributes:
        prompt: The ids.
        messages: What stands in it: leading system content and the kept turns.
        dropped_turns: How many of the oldest turns are left out.
        dropped_messages: Their messages; what a transcript of this conversation says.
        shifted: More turns are left out than in what was known: all rows of it are void.
    """

    prompt: Prompt
    messages: Messages
    dropped_turns: int
    dropped_messages: int
    shifted: bool


class PromptCounts(Sequence[int]):
    """Tokens of a conversation's prompt by how many of its oldest turns are dropped.

    Each is counted when it is asked for, by rendering; a plan asks for a logarithm of them.

    Args:
        renderer: The model's.
        request: Whose tools and options are part of every prompt.
        parts: The conversation.
        whole: Tokens with nothing dropped, where they are known.
    """

    def __init__(
        self,
        renderer: Renderer,
        request: ChatRequest,
        parts: Conversation,
        whole: int | None = None,
    ) -> None:
        self._renderer = renderer
        self._request = request
        self._parts = parts
        self._counted: dict[int, int] = {} if whole is None else {0: whole}

    def __len__(self) -> int:
        return max(1, len(self._parts.turns))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index not in self._counted:
            self._counted[index] = self._count(self._parts.without(index))
        return self._counted[index]

    def leading(self) -> int:
        """Tokens of the leading system content alone; 0 where a template writes none alone."""
        try:
            return self._count(self._parts.leading) if self._parts.leading else 0
        except ChatTemplateError:
            return 0

    def _count(self, messages: Messages) -> int:
        return self._renderer.count(messages, self._request.tools, self._request.options)


def compose(
    renderer: Renderer, request: ChatRequest, budget: Budget, found: Found | None = None
) -> Composed:
    """The prompt for an answer to ``request``, all of whose messages the client sent.

    What is kept depends on the messages and the budget alone, never on what was found: a
    conversation is shortened the same way after a restart.

    Args:
        renderer: The model's.
        request: The conversation.
        budget: The room, and what happens to what is longer.
        found: What :func:`node.chat.transcripts.find` found of the conversation.

    Raises:
        ContextLengthError: It does not fit; the message names what.
        ChatTemplateError: The template refuses the messages.
        FormatError: Tools were given and the template writes none.
    """
    parts = Conversation.of(request.messages)
    before = 0 if found is None else found.transcript.dropped_messages
    prompt = None if found is None or before else _continued(renderer, request, parts, found)
    whole = None if prompt is None else len(prompt.token_ids)
    if whole is not None and _FEW * whole > budget.room:
        # Known ids may be some more or fewer than their text takes when it is encoded, and the
        # text decides. Far below the room that is no question, and the text need not be encoded.
        whole = None
    decided = _decide(parts, PromptCounts(renderer, request, parts, whole), budget)
    if found is not None and prompt is None and before == decided.dropped_messages:
        prompt = _continued(renderer, request, parts, found)
    fits = prompt is not None and len(prompt.token_ids) <= budget.room
    if prompt is None or not fits or before != decided.dropped_messages:
        prompt = renderer.prompt(decided.messages, request.tools, request.options)
    shifted = found is not None and before < decided.dropped_messages
    return _composed(prompt, decided, shifted=shifted)


def _continued(
    renderer: Renderer, request: ChatRequest, parts: Conversation, found: Found
) -> Prompt:
    known = known_of(found, request.messages, len(parts.leading))
    new = request.messages[found.covered_messages :]
    return renderer.continue_from(known, new, request.tools, request.options)


def compose_next(
    renderer: Renderer, known: Known, request: ChatRequest, budget: Budget
) -> Composed:
    """The prompt for an answer in a conversation that is kept here, given its new messages only.

    Args:
        renderer: The model's.
        known: The retained messages and their exact ids; what earlier shifts dropped is gone.
        request: The new messages, with tools and options.
        budget: The room.

    Raises:
        ContextLengthError: It does not fit; the message names what.
        ChatTemplateError: The template refuses the messages.
        FormatError: Tools were given and the template writes none.
    """
    whole = ChatRequest((*known.messages, *request.messages), request.tools, request.options)
    if not known.token_ids:
        return compose(renderer, whole, budget)
    prompt = renderer.continue_from(known, request.messages, request.tools, request.options)
    parts = Conversation.of(whole.messages)
    counts = PromptCounts(renderer, whole, parts, len(prompt.token_ids))
    decided = _decide(parts, counts, budget)
    if decided.dropped_turns:
        prompt = renderer.prompt(decided.messages, request.tools, request.options)
    return _composed(prompt, decided, shifted=decided.dropped_turns > 0)


def _composed(prompt: Prompt, decided: Plan, *, shifted: bool) -> Composed:
    return Composed(
        prompt, decided.messages, decided.dropped_turns, decided.dropped_messages, shifted
    )


def _decide(parts: Conversation, counts: PromptCounts, budget: Budget) -> Plan:
    # Counting the system's content alone costs a rendering, which only a refusal needs.
    decided = plan(parts, counts, 0, budget)
    if isinstance(decided, Refusal):
        decided = plan(parts, counts, counts.leading(), budget)
    if isinstance(decided, Refusal):
        raise ContextLengthError(decided.text, decided.limit_tokens, decided.needed_tokens)
    return decided
