"""What the slots are told: how many, how long a context, what an answer is by default."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.errors import UsageError

SLOTS: Final = 2
SLOTS_MAX: Final = 4

#: Rows that stay in memory for later prompts, by default: 1 GiB.
CACHE_BYTES: Final = 1 << 30

#: Tokens of an answer whose request names no number: what mlx_lm.server gives.
MAX_TOKENS: Final = 512

#: Prompts shorter than this are not sent to a producer: the way costs more than the work.
REMOTE_TOKENS_MIN: Final = 4096


class ContextPolicy(enum.Enum):
    """What happens to a conversation that does not fit the context any more."""

    SHIFT = "shift"  # whole oldest turns are dropped, and the rest is computed anew
    ERROR = "error"  # it is refused


class PrefillAt(enum.Enum):
    """Where long prompts are computed."""

    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class AnswerDefaults:
    """What an answer is where the request does not say: the defaults of ``mlx_lm.server``.

    Attributes:
        max_tokens: Tokens at most.
        temperature: 0 is greedy.
        top_p: Probability mass that stays.
        top_k: Tokens that stay; 0 keeps all.
        min_p: Smallest share of the most probable token's probability.
    """

    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options of ``kvnode serve`` for what is behind its ports.

    Attributes:
        slots: Answers that are computed in turn.
        context_policy: What happens to a conversation that is too long.
        max_context: Tokens of a context at most; None: as many as the model takes.
        keep_tokens: First tokens of a raw prompt that a shift keeps.
        cache_bytes: Rows that stay in memory for later prompts.
        answer: What an answer is where the request does not say.
        chat_template: The text of a template to be used instead of the model's own.
        slot_save_path: Folder of packs that ``/slots`` saves and restores; None: neither.
        prefill: Where long prompts are computed.
        producer: ``NAME@HOST:PORT`` of the node that computes them.
        remote_tokens_min: Prompts of fewer new tokens stay here.

    Raises:
        UsageError: Names the option, what it may be and what was given.
    """

    slots: int = SLOTS
    context_policy: ContextPolicy = ContextPolicy.SHIFT
    max_context: int | None = None
    keep_tokens: int = 0
    cache_bytes: int = CACHE_BYTES
    answer: AnswerDefaults = AnswerDefaults()
    chat_template: str | None = None
    slot_save_path: Path | None = None
    prefill: PrefillAt = PrefillAt.LOCAL
    producer: str | None = None
    remote_tokens_min: int = REMOTE_TOKENS_MIN

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= SLOTS_MAX:
            raise UsageError(f"--slots {self.slots}: expected 1 to {SLOTS_MAX}")
        if self.cache_bytes < 0:
            raise UsageError(f"--cache-bytes {self.cache_bytes}: expected 0 or more")
        if self.max_context is not None and self.max_context < 1:
            raise UsageError(f"--max-context {self.max_context}: expected 1 or more")
        if (self.prefill is PrefillAt.REMOTE) != (self.producer is not None):
            raise UsageError("--prefill remote and --producer: expected both or neither")
