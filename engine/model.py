"""A loaded model: what node code holds on to.

The engine thread owns it. MLX binds streams to threads, so a call from a second thread would
compute on another stream without any order between the two; it is refused instead.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from engine import chat
from engine.cache import PlaneCache
from engine.chat import ParsedCall, ReplyMarks
from engine.generation import Generation, empty_planes
from engine.install import Installer
from engine.origins import PlaneLayout
from engine.stream_bytes import TokenBytes
from kvpack.identity import Identity, NumericsFingerprint
from kvpack.layout import CacheLayout, Producer


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]:
        """Ids of ``text``."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids``."""

    @property
    def chat_template(self) -> object:
        """The template in force; None or empty where there is none."""

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
    ) -> list[int]:
        """Ids of ``messages`` in the model's own form."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedParts:
    """What the loader found in a model folder.

    Attributes:
        name: The folder's name; a label, never identity.
        call: The network: token ids ``[1, count]`` and caches to logits ``[1, count, vocab]``.
        tokenizer: Text to ids and back.
        layout: Shape of the cache, layer by layer.
        plane_layout: Axis order of the planes.
        vocab_size: Number of logits.
        identity: Identity for a placeholder tenant.
        numerics: What decides the bits of a continuation.
        end_token_ids: Ids that end an answer.
    """

    name: str
    call: Callable[[mx.array, Sequence[PlaneCache]], mx.array]
    tokenizer: Tokenizer
    layout: CacheLayout
    plane_layout: PlaneLayout
    vocab_size: int
    identity: Identity
    numerics: NumericsFingerprint
    end_token_ids: frozenset[int] = frozenset()


class Model:
    """Weights, tokenizer and cache layout of one model folder."""

    __slots__ = ("_parts", "_thread")

    def __init__(self, parts: LoadedParts) -> None:
        """Bind the model to the calling thread."""
        self._parts = parts
        self._thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {len(self.layout.layers)} layers)"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._parts.name

    @property
    def layout(self) -> CacheLayout:
        """Shape of the cache, layer by layer."""
        return self._parts.layout

    @property
    def plane_layout(self) -> PlaneLayout:
        """Axis order of the planes."""
        return self._parts.plane_layout

    @property
    def vocab_size(self) -> int:
        """Number of logits; token ids are below it."""
        return self._parts.vocab_size

    @property
    def window_tokens(self) -> int:
        """The smallest window of any layer; the whole context where no layer has one."""
        windows = [layer.window_tokens for layer in self.layout.layers]
        return min((w for w in windows if w is not None), default=self.layout.max_context_tokens)

    def identity(self, tenant: str) -> Identity:
        """Everything whose change makes stored rows somebody else's rows."""
        return dataclasses.replace(self._parts.identity, tenant=tenant)

    def numerics(self) -> NumericsFingerprint:
        """What decides the bits of a continuation, beyond identity and call shapes."""
        return self._parts.numerics

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; without the tokenizer's own begin and end marks by default."""
        return self._parts.tokenizer.encode(text, add_special_tokens=special_tokens)

    def encode_user_message(self, text: str) -> list[int]:
        """Token ids of ``text`` as an open message of the user; plain ids without a template."""
        if not self._parts.tokenizer.chat_template:
            return self.encode(text, special_tokens=True)
        messages = [{"role": "user", "content": text}]
        return list(
            self._parts.tokenizer.apply_chat_template(
                messages, add_generation_prompt=False, continue_final_message=True
            )
        )

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end an answer, from the folder's configuration and its tokenizer."""
        return self._parts.end_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations have a form of the model's own; else the plain one is used."""
        return chat.has_template(self._parts.tokenizer)

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tools."""
        return chat.takes_tools(self._parts.tokenizer)

    @property
    def reply_marks(self) -> ReplyMarks:
        """What sets thoughts and tool calls apart from the answer."""
        return chat.marks_of(self._parts.tokenizer)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, object] = chat.NO_OPTIONS,
    ) -> str:
        """The text of a conversation in the model's form; ``encode`` makes ids of it.

        Any thread may call this, ``encode``, ``decode`` and ``parse_tool_call``. A model folder
        without a template gets :data:`engine.chat.FALLBACK_TEMPLATE`.

        Args:
            messages: With ``role`` and ``content`` each, as the template expects them.
            tools: As the template expects them; empty for none.
            add_generation_prompt: End with what an answer follows.
            options: More arguments for the template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: The template refuses the messages, or an option is not to be given.
        """
        return chat.render(
            self._parts.tokenizer,
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            options=options,
        )

    def parse_tool_call(
        self, text: str, tools: Sequence[Mapping[str, object]] = ()
    ) -> tuple[ParsedCall, ...]:
        """The tool calls in ``text``, which stood between ``reply_marks``.

        Raises:
            ToolCallError: It is none, or this model has no form for them.
            LimitError: ``text`` is longer than a tool call may be.
        """
        return chat.parse_tool_call(self._parts.tokenizer, text, tools)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``."""
        return self._parts.tokenizer.decode(list(ids))

    def token_bytes(self) -> TokenBytes:
        """Bytes of each token, for text that arrives token by token.

        Raises:
            ModelFolderError: Tokens of this tokenizer do not stand for bytes.
        """
        return TokenBytes.of(self._parts.tokenizer)

    def new_generation(self) -> Generation:
        """An empty session."""
        self._require_thread()
        return Generation(self, empty_planes(self))

    def installer(
        self, position: int, *, growing: bool = False, producer: Producer = Producer.ENGINE
    ) -> Installer:
        """A detached generation for a cut after ``position`` tokens, to be filled with tiles.

        Args:
            position: Tokens of the cut; if growing, at least so many.
            growing: The cut is fixed later.
            producer: Who computed the rows, as snapshot or manifest say.

        Raises:
            LayoutMismatchError: Rows of ``producer`` are not continued here. Nothing was taken.
            LimitError: ``position`` is outside the context.
        """
        self._require_thread()
        return Installer(self, position, growing=growing, producer=producer)

    def forward(self, token_ids: mx.array, caches: Sequence[PlaneCache]) -> mx.array:
        """Logits ``[1, count, vocab_size]`` for ``token_ids`` ``[1, count]``; lazy.

        Raises:
            RuntimeError: Called from another thread than the one that loaded the model.
        """
        self._require_thread()
        return self._parts.call(token_ids, caches)

    def _require_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a model may only be used on the thread that loaded it")
