"""A conversation as leading system content and turns.

A turn starts at a user's message and carries everything up to the next one: the answer, tool calls
and their results. What comes before the first user's message and is not the system's, such as a
greeting, belongs to the first turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from node.chat.messages import Message, Messages, Role


@dataclass(frozen=True, slots=True, repr=False)
class Conversation:
    """A conversation in parts.

    Attributes:
        leading: System messages before the first turn.
        turns: The turns, oldest first; none of them empty.
    """

    leading: Messages
    turns: tuple[Messages, ...]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Conversation:
        """The parts of ``messages``."""
        starts = turn_starts(messages)
        head = starts[0] if starts else len(messages)
        edges = pairwise([*starts, len(messages)])
        return cls(tuple(messages[:head]), tuple(tuple(messages[a:b]) for a, b in edges))

    def without(self, dropped_turns: int) -> Messages:
        """The messages that are left when the oldest turns are dropped."""
        kept = self.turns[dropped_turns:]
        return (*self.leading, *(message for turn in kept for message in turn))

    def late_system_message(self) -> int | None:
        """Index among all messages of the first system message after the first turn began."""
        index = len(self.leading)
        for turn in self.turns:
            for message in turn:
                if message.role.is_system:
                    return index
                index += 1
        return None


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Where each turn begins, as indices of messages; empty where all are the system's."""
    head = sum(1 for _ in takewhile(lambda message: message.role.is_system, messages))
    if head == len(messages):
        return []
    users = [i for i in range(head, len(messages)) if messages[i].role is Role.USER]
    # The first user's message belongs to the turn that is open already.
    return [head, *users[1:]]
