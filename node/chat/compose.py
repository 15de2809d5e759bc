"""From a request's messages to the prompt that is computed: policy, known ids, rendering.

This takes time in proportion to the conversation, so it belongs on a worker thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from engine import ChatTemplateError
from node.chat.messages import Messages
from node.chat.policy import Budget, Plan, Refusal, plan
from node.chat.render import Known, Prompt, Renderer
from node.chat.tools import Tool
from node.chat.transcripts import Found, known_of
from node.chat.turns import Conversation
from node.errors import ContextLengthError


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
    """

    def __init__(self, renderer: Renderer, request: ChatRequest, parts: Conversation) -> None:
        self._renderer = renderer
        self._request = request
        self._parts = parts
        self._counted: dict[int, int] = {}

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
            self.set(index, self._count(self._parts.without(index)))
        return self._counted[index]

    def set(self, dropped_turns: int, tokens: int) -> None:
        """Take ``tokens`` as counted."""
        self._counted[dropped_turns] = tokens

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
    """The prompt for an answer to ``request``.

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
    before = _turns_of(parts, found)
    prompt = _prompt(renderer, request, parts, found, before)
    counts = PromptCounts(renderer, request, parts)
    counts.set(before, len(prompt.token_ids))
    decided = _decide(parts, counts, budget, before)
    shifted = decided.dropped_turns > before
    if shifted:
        prompt = renderer.prompt(decided.messages, request.tools, request.options)
    return Composed(
        prompt, decided.messages, decided.dropped_turns, decided.dropped_messages, shifted
    )


def compose_next(
    renderer: Renderer,
    known: Known,
    request: ChatRequest,
    budget: Budget,
) -> Composed:
    """As :func:`compose`, for a conversation that is kept here and given new messages only.

    Args:
        renderer: The model's.
        known: The retained messages and their exact ids.
        request: The new messages, with tools and options.
        budget: The room.

    Raises:
        ContextLengthError: It does not fit; the message names what.
        ChatTemplateError: The template refuses the messages.
        FormatError: Tools were given and the template writes none.
    """
    messages = (*known.messages, *request.messages)
    whole = ChatRequest(messages, request.tools, request.options)
    if not known.token_ids:
        return compose(renderer, whole, budget)
    # Retained messages have nothing dropped between them: what an earlier shift dropped is gone.
    prompt = renderer.continue_from(known, request.messages, request.tools, request.options)
    parts = Conversation.of(messages)
    counts = PromptCounts(renderer, whole, parts)
    counts.set(0, len(prompt.token_ids))
    decided = _decide(parts, counts, budget, 0)
    if decided.dropped_turns:
        prompt = renderer.prompt(decided.messages, request.tools, request.options)
    return Composed(
        prompt,
        decided.messages,
        decided.dropped_turns,
        decided.dropped_messages,
        decided.dropped_turns > 0,
    )


def _turns_of(parts: Conversation, found: Found | None) -> int:
    """How many turns were dropped from what was found; 0 where that is no number of turns."""
    wanted = 0 if found is None else found.transcript.dropped_messages
    messages = 0
    for turns, turn in enumerate(parts.turns[:-1], start=1):
        messages += len(turn)
        if messages == wanted:
            return turns
    return 0


def _prompt(
    renderer: Renderer,
    request: ChatRequest,
    parts: Conversation,
    found: Found | None,
    dropped_turns: int,
) -> Prompt:
    if found is None or (found.transcript.dropped_messages and not dropped_turns):
        return renderer.prompt(request.messages, request.tools, request.options)
    known = known_of(found, request.messages, len(parts.leading))
    new = request.messages[found.covered_messages :]
    return renderer.continue_from(known, new, request.tools, request.options)


def _decide(parts: Conversation, counts: PromptCounts, budget: Budget, before: int) -> Plan:
    # Counting the system's content alone costs a rendering, which only a refusal needs.
    decided = plan(parts, counts, 0, budget, before)
    if isinstance(decided, Refusal):
        decided = plan(parts, counts, counts.leading(), budget, before)
    if isinstance(decided, Refusal):
        raise ContextLengthError(decided.text, decided.limit_tokens, decided.needed_tokens)
    return decided
