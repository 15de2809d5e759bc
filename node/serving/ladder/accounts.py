"""What the ladder counts. Plain numbers, changed on the event loop, read by whoever shows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from node.serving.order import MissReason, Rung


@dataclass(slots=True)
class Accounts:
    """Since the start of the process.

    Attributes:
        begun: How often somebody asked where to begin, by the rung that answered. ``CURRENT`` is
            for whoever goes on in a live state: a session's continuation is no hit of a cache.
        misses: The same, by why not all of the prefix was held.
        restored_bytes: Plaintext of rows that were brought back, from manifests.
        restored_tokens: Tokens whose rows were brought back.
        memory_bytes: Of the restored bytes, those that were in memory already.
        published: Cuts that became durable.
        published_bytes: Bytes of chunks that were written for them.
        shared_chunks: References of these cuts to chunks that were there already.
        dropped: Cuts that were not kept: too many waited, no room, or the store refused.
        damaged: Cuts that were there and could not be proved.
        evicted: Holds that went for want of room.
        superseded: Holds that went because later cuts of their lineage took their place.
        collections: How often garbage was collected.
    """

    begun: dict[Rung, int] = field(default_factory=lambda: dict.fromkeys(Rung, 0))
    misses: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    restored_bytes: int = 0
    restored_tokens: int = 0
    memory_bytes: int = 0
    published: int = 0
    published_bytes: int = 0
    shared_chunks: int = 0
    dropped: int = 0
    damaged: int = 0
    evicted: int = 0
    superseded: int = 0
    collections: int = 0

    def began(self, rung: Rung, miss: MissReason) -> None:
        """An answer began."""
        self.begun[rung] += 1
        self.misses[miss] += 1
