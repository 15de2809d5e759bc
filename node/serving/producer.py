"""What is asked of a producer node, and what comes of it: values alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpack.errors import LimitError
from kvpack.limits import check_range
from node.config import Address
from node.serving.order import Fallback

if TYPE_CHECKING:
    from engine import Generation


@dataclass(frozen=True, slots=True)
class ProducerOrder:
    """Which node computes long prompts, and how long it is waited for.

    Attributes:
        node: Its name: that of its certificate.
        address: Where it listens.
        own_address: Where it reaches this node.
        min_tokens: Prompts of which fewer tokens are missing here are computed here.
        answer_s: How long it may take until it says anything.
        stall_s: How long it may take from then on without progress.
        total_s: How long it may take altogether.
        rest_s: For how long it is not asked after a failure, doubled by each further one.

    Raises:
        LimitError: A number is outside its range.
    """

    node: str
    address: Address
    own_address: Address
    min_tokens: int = 4096
    answer_s: float = 10.0
    stall_s: float = 20.0
    total_s: float = 600.0
    rest_s: float = 5.0

    def __post_init__(self) -> None:
        check_range("remote.min_tokens", self.min_tokens, 2, 1 << 31, "tokens")
        for name in ("answer_s", "stall_s", "total_s", "rest_s"):
            if not 0 < getattr(self, name) <= 86_400:
                raise LimitError(f"remote.{name}", "above 0, at most 86400 s", getattr(self, name))
        if self.own_address.host in ("0.0.0.0", "::"):  # noqa: S104 - refused, not bound
            raise LimitError("remote.own_address", "an address to come back to", self.own_address)


@dataclass(frozen=True, slots=True, repr=False)
class Arrival:
    """Rows that a producer computed.

    Attributes:
        generation: Those of all tokens but the boundary token.
        exact: Numerics are equal and the boundary call agreed.
        row_bytes: Their plaintext.
    """

    generation: Generation
    exact: bool
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a producer did not compute a prompt; ``detail`` is for the log and the page."""

    kind: Fallback
    detail: str


@dataclass(slots=True)
class RemoteCounts:
    """What remote prefill came to since the start.

    Attributes:
        asked: Prompts for which the producer was called.
        arrived: Of those, whose rows came whole.
        tokens: Tokens computed there.
        row_bytes: Plaintext of their rows.
        fallbacks: Prompts computed here instead, by reason; those that did not ask are included.
    """

    asked: int = 0
    arrived: int = 0
    tokens: int = 0
    row_bytes: int = 0
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
