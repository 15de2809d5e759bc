"""How conversations with a model are written, and how its answers are read.

The template in the model folder decides the text of a conversation; its tokenizer says which marks
set thoughts and tool calls apart from the answer. Everything here may be called from any thread:
rendering shares nothing that it changes, and :func:`settle` leaves the tokenizer in a state that no
later call changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from engine.errors import ChatTemplateError, ModelFolderError, ToolCallError
from kvpack.limits import check_range

#: The form of a conversation where the model folder has no template of its own: a heading for each
#: role on a line of its own, and the end token after each answer. An answer is continued exactly:
#: what a model writes after the last heading stands in the same place when it is rendered again.
FALLBACK_TEMPLATE: Final = r"""
{{- bos_token or '' -}}
{%- for message in messages -%}
{{- '### ' ~ message.role | capitalize ~ '\n' ~ message.content -}}
{{- eos_token or '' if message.role == 'assistant' else '' -}}
{{- '\n\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '### Assistant\n' -}}
{%- endif -%}
"""

#: Arguments of the template that are this module's to give.
_RESERVED_OPTIONS: Final = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("tokenizer_kwargs", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
        *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length"),
    }
)

NO_OPTIONS: Final[Mapping[str, object]] = MappingProxyType({})

#: Characters of one tool call; parsers look at a text several times.
TOOL_CALL_CHARACTERS_MAX: Final = 256 << 10

#: What parsers and literal readers raise for a text that is no tool call. The last two are how
#: Python refuses to read a text that is nested too deeply.
_NO_CALL: Final = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True, slots=True)
class ReplyMarks:
    """What sets the parts of an answer apart, as text; empty where a model has no such part.

    Attributes:
        think_start: Begins a thought.
        think_end: Ends it.
        tool_start: Begins a tool call.
        tool_end: Ends it; empty where a tool call reaches to the end of the answer.
    """

    think_start: str = ""
    think_end: str = ""
    tool_start: str = ""
    tool_end: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class ParsedCall:
    """A tool call that was read out of an answer.

    Attributes:
        name: Of the tool.
        arguments: A JSON object, as text.
        call_id: As the model numbered it; empty where it did not.
    """

    name: str
    arguments: str
    call_id: str = ""


def settle(tokenizer: Any) -> None:  # noqa: ANN401  transformers is untyped
    """Bring a fresh tokenizer into the state that no later call changes, and check its template.

    A tokenizer's file may ask for truncation or padding; the first call for plain ids takes both
    away, and every later one finds it as it wants it. After that calls only read, from any thread.

    Raises:
        ModelFolderError: The template is no Jinja template.
    """
    tokenizer.encode(" ", add_special_tokens=False)
    if not tokenizer.chat_template:
        return
    try:
        render(tokenizer, [{"role": "user", "content": " "}])
    except ChatTemplateError as error:
        # Whatever else it does not like may be the message; that is for requests to find out.
        if isinstance(error.__cause__, TemplateSyntaxError):
            raise ModelFolderError(f"chat_template: {error.detail}") from error


def marks_of(tokenizer: Any) -> ReplyMarks:  # noqa: ANN401
    """The marks that ``tokenizer`` knows of."""
    names = ("think_start", "think_end", "tool_call_start", "tool_call_end")
    return ReplyMarks(*(getattr(tokenizer, name, None) or "" for name in names))


def end_token_ids_of(
    configured: object,
    tokenizer: Any,  # noqa: ANN401
    vocab_size: int,
) -> frozenset[int]:
    """Ids that end an answer: the configured ones, and the tokenizer's.

    Args:
        configured: ``eos_token_id`` of the generation config, else of the config.
        tokenizer: Its own is added, as templates end messages with it.
        vocab_size: Ids are below it.

    Raises:
        ModelFolderError: A configured one is no token id.
    """
    listed = configured if isinstance(configured, list) else [configured]
    found: set[int] = set()
    for value in listed:
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            raise ModelFolderError(f"eos_token_id: expected ids below {vocab_size}, found {value}")
        found.add(value)
    own = getattr(tokenizer, "eos_token_id", None)
    if type(own) is int and 0 <= own < vocab_size:
        found.add(own)
    return frozenset(found)


def has_template(tokenizer: Any) -> bool:  # noqa: ANN401
    """Whether the model folder, or who loaded it, says how a conversation is written."""
    return bool(getattr(tokenizer, "has_chat_template", False) or tokenizer.chat_template)


def takes_tools(tokenizer: Any) -> bool:  # noqa: ANN401
    """Whether the template writes tools."""
    template = tokenizer.chat_template
    if not template:
        # One that is code instead of a template: its own check has to do.
        return has_template(tokenizer)
    return "tools" in (template if isinstance(template, str) else json.dumps(template))


def render(
    tokenizer: Any,  # noqa: ANN401
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] = (),
    *,
    add_generation_prompt: bool = True,
    options: Mapping[str, object] = NO_OPTIONS,
) -> str:
    """The text of a conversation; :meth:`engine.model.Model.render_chat` says what goes in."""
    for name in sorted(options):
        if name in _RESERVED_OPTIONS:
            raise ChatTemplateError(f"template option {name!r} is reserved")
    given = {} if has_template(tokenizer) else {"chat_template": FALLBACK_TEMPLATE}
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **given,
            **options,
        )
    except (TemplateError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ChatTemplateError("the chat template refuses these messages", detail) from error
    return str(rendered)


def parse_tool_call(
    tokenizer: Any,  # noqa: ANN401
    text: str,
    tools: Sequence[Mapping[str, object]],
) -> tuple[ParsedCall, ...]:
    """The calls in ``text``, which stood between the marks; :class:`ToolCallError` if none do."""
    parser = getattr(tokenizer, "tool_parser", None)
    if parser is None:
        raise ToolCallError("this model has no form for tool calls")
    check_range("tool_call", len(text), 0, TOOL_CALL_CHARACTERS_MAX, "characters")
    try:
        found = parser(text, [dict(tool) for tool in tools] or None)
        calls = tuple(_calls(found if isinstance(found, list) else [found]))
    except _NO_CALL as error:
        raise ToolCallError("the text is no tool call") from error
    if not calls:
        raise ToolCallError("the text is an empty list of tool calls")
    return calls


def _calls(found: Iterable[Any]) -> Iterable[ParsedCall]:
    for call in found:
        name, arguments = call["name"], call["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("a tool call has a name and a JSON object")
        call_id = call.get("id")
        encoded = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        yield ParsedCall(name, encoded, call_id if isinstance(call_id, str) else "")
