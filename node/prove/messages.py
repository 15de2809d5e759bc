"""What parent and child say to each other: one JSON object a line, requests and answers in turn.

Both ends are this very build, so the messages have no version. Paths go down to the child and
never come back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from node.prove.cases import (
    Continuation,
    Group,
    History,
    ModelShape,
    RollbackStation,
    Route,
    ShapePair,
    Station,
)

#: A history of runs is short; a list of 10,000 single calls would be one run.
LINE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Facts:
    """What a child found when it had loaded the model.

    Attributes:
        windows: The distinct windows, ascending.
        context_tokens: Longest context.
        sliding_layers: Layers with a window.
        full_layers: Layers without.
        full_row_bytes: K/V bytes of one token in all full layers.
        window_bytes: K/V bytes of all windows together, when they are full.
        model: Architecture and dtype.
        dtype: Name of the rows' dtype.
        numerics: Name and value of everything that decides bits.
        numerics_digest: 32 bytes over it, hexadecimal.
        load_s: Seconds to load.
        step_s: Seconds of one single-token call.
        token_s: Seconds of prefill per token.
    """

    windows: tuple[int, ...]
    context_tokens: int
    sliding_layers: int
    full_layers: int
    full_row_bytes: int
    window_bytes: int
    model: str
    dtype: str
    numerics: dict[str, str]
    numerics_digest: str
    load_s: float
    step_s: float
    token_s: float

    @property
    def shape(self) -> ModelShape:
        """What the case list depends on."""
        return ModelShape(self.windows, self.context_tokens)

    def cut_bytes(self, position: int) -> int:
        """K/V bytes of a cut, as an upper bound."""
        return self.full_row_bytes * position + self.window_bytes

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """From a line."""
        return cls(**{**value, "windows": tuple(value["windows"])})


def encode(value: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(value, separators=(",", ":"), default=_plain).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """A line's object.

    Raises:
        ValueError: It is not one.
    """
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _plain(value: object) -> object:
    if isinstance(value, Group | Route | Continuation):
        return value.value
    if isinstance(value, History | Station | RollbackStation | ShapePair | Facts):
        return asdict(value)
    raise TypeError(type(value).__name__)


def history_of(value: Mapping[str, Any]) -> History:
    """From a line."""
    return History(value["label"], tuple((tokens, calls) for tokens, calls in value["runs"]))


def station_of(value: Mapping[str, Any]) -> Station:
    """From a line."""
    return Station(
        value["name"],
        history_of(value["history"]),
        tuple((Route(route), Continuation(kind)) for route, kind in value["restores"]),
        value["essential"],
    )


def rollback_of(value: Mapping[str, Any]) -> RollbackStation:
    """From a line."""
    blocks = tuple((count, kept) for count, kept in value["blocks"])
    return RollbackStation(value["name"], history_of(value["history"]), blocks, value["essential"])


def pair_of(value: Mapping[str, Any]) -> ShapePair:
    """From a line."""
    left, right = history_of(value["left"]), history_of(value["right"])
    return ShapePair(Group(value["group"]), left, right, value["block_tokens"])
