"""Conversations to token ids, from scratch or as the continuation of known ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from engine import ChatTemplateError
from kvpack.errors import FormatError
from node.chat.messages import Message, Messages
from node.chat.splice import Codec, Splice, Spliced, TokenTable, splice
from node.chat.tools import Tool, tool_objects
from node.chat.turns import turn_starts

if TYPE_CHECKING:
    from engine import ReplyMarks

_NO_OPTIONS: Final[Mapping[str, object]] = MappingProxyType({})

#: Ends of turns that are looked for in a prompt: as many as keep their windows in a store.
TURN_ENDS_MAX: Final = 4


class ChatModel(Protocol):
    """What is needed of an ``engine.Model``; all of it may be called from any thread."""

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tools."""

    @property
    def reply_marks(self) -> ReplyMarks:
        """What sets thoughts and tool calls apart from the answer."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = ...,
        *,
        add_generation_prompt: bool = ...,
        options: Mapping[str, object] = ...,
    ) -> str:
        """The text of a conversation."""

    def encode(self, text: str, *, special_tokens: bool = ...) -> list[int]:
        """Ids of ``text``."""

    def token_bytes(self) -> Callable[[int], bytes]:
        """Bytes of each token."""


@dataclass(frozen=True, slots=True, repr=False)
class Known:
    """A conversation whose exact ids are known, answers among them as they were generated.

    Attributes:
        messages: The conversation.
        token_ids: Its ids, with or without the token that ended the last answer.
    """

    messages: Messages
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Prompt:
    """What an answer follows.

    Attributes:
        token_ids: The whole context.
        kept_tokens: So many of them are the known ones; 0 where nothing was known.
        splice: How they came about. ``FULL`` and ``REWOUND`` say that not all known ids are kept.
        in_thought: The answer begins inside of a thought, which the prompt opened.
        turn_ends: Where the newest whole turns end, as counts of tokens, ascending; only where
            the text and a token end there.
    """

    token_ids: tuple[int, ...]
    kept_tokens: int
    splice: Splice
    in_thought: bool
    turn_ends: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"Prompt({len(self.token_ids)} tokens, {self.kept_tokens} kept, {self.splice.value})"


class Renderer:
    """Writes conversations in one model's form. Any thread may use it."""

    __slots__ = ("_codec", "_model")

    def __init__(self, model: ChatModel) -> None:
        """Bind to ``model``.

        Raises:
            ModelFolderError: Tokens of its tokenizer do not stand for bytes.
        """
        self._model = model
        self._codec = Codec(model.encode, TokenTable(model.token_bytes()).__getitem__)

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, object] = _NO_OPTIONS,
    ) -> Prompt:
        """The prompt for an answer to ``messages``.

        Args:
            messages: The conversation, the newest last.
            tools: What the model may call.
            options: More arguments for the template.

        Raises:
            ChatTemplateError: The template refuses the messages.
            FormatError: ``tools`` were given and the template writes none.
        """
        text = self._text(messages, tools, options)
        ids = tuple(self._codec.encode(text))
        ends = self._turn_ends(messages, tools, options, text, ids)
        return Prompt(ids, 0, Splice.FRESH, self._opens_thought(text), ends)

    def continue_from(
        self,
        known: Known,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, object] = _NO_OPTIONS,
    ) -> Prompt:
        """The prompt for an answer to ``new_messages``, which follow those of ``known``.

        The known ids stay as they are wherever the template writes the known messages as it did
        before; ids are added for what comes after. Where it writes them otherwise (it leaves out
        earlier thoughts, say), or the answer was longer than what the client saw of it, the prompt
        says how many known ids are left.

        Raises:
            ChatTemplateError: The template refuses the messages.
            FormatError: ``tools`` were given and the template writes none.
        """
        messages = (*known.messages, *new_messages)
        text = self._text(messages, tools, options)
        found: Spliced = splice(known.token_ids, text, self._codec)
        ends = self._turn_ends(messages, tools, options, text, found.token_ids)
        opened = self._opens_thought(text)
        return Prompt(found.token_ids, found.kept_tokens, found.splice, opened, ends)

    def count(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, object] = _NO_OPTIONS,
    ) -> int:
        """Tokens of the prompt for an answer to ``messages``.

        Raises:
            ChatTemplateError: The template refuses the messages.
            FormatError: ``tools`` were given and the template writes none.
        """
        return len(self._codec.encode(self._text(messages, tools, options)))

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, object],
        *,
        answer_follows: bool = True,
    ) -> str:
        if tools and not self._model.takes_tools:
            raise FormatError("tools", "none: this model's chat template writes no tools", "some")
        return self._model.render_chat(
            [message.for_template() for message in messages],
            tool_objects(tools),
            add_generation_prompt=answer_follows,
            options=options,
        )

    def _opens_thought(self, text: str) -> bool:
        start = self._model.reply_marks.think_start
        return bool(start) and text.rstrip().endswith(start)

    def _turn_ends(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, object],
        text: str,
        token_ids: Sequence[int],
    ) -> tuple[int, ...]:
        """Ends of the newest turns before the last one, which is still going on."""
        ends = set()
        for start in turn_starts(messages)[1:][-TURN_ENDS_MAX:]:
            try:
                before = self._text(messages[:start], tools, options, answer_follows=False)
            except ChatTemplateError:
                # It writes whole conversations only; then no turn of it has an end to be found.
                break
            if text.startswith(before):
                ends.add(self._position(token_ids, text[len(before) :]))
        return tuple(sorted(ends - {0}))

    def _position(self, token_ids: Sequence[int], rest: str) -> int:
        """How many tokens there are before ``rest``, the end of the text; 0 where none ends there.

        Counted from the end, since the rest is short where the conversation is long.
        """
        wanted, index = len(rest.encode()), len(token_ids)
        while wanted > 0 and index:
            index -= 1
            wanted -= len(self._codec.token_bytes(token_ids[index]))
        return index if wanted == 0 and self._codec.text(token_ids[index:]) == rest else 0
