"""What a running node says of itself: its kind, and how much KV memory is taken."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from kvpack.layout import CacheLayout, LayerKind
from kvpack.wire import encode_numerics
from node.placement.values import KV_BYTES_MAX, Kind, NodeState
from node.sessions import SESSIONS_MAX

if TYPE_CHECKING:
    from node.binding import PackBinding
    from node.config import Address
    from node.sessions import Sessions

#: The part of a machine's memory that its sessions get where nobody said: the weights, caches of
#: rows and the rest of the machine have the other half.
_SHARE: Final = 2


def default_kv_bytes() -> int:
    """What sessions get of this machine's memory, in bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total // _SHARE, KV_BYTES_MAX)


def row_bytes(layout: CacheLayout, tokens: int) -> int:
    """What the rows of a session of so many known tokens take: the last one has none yet."""
    position = max(0, min(tokens - 1, layout.max_context_tokens))
    return sum(layout.state_bytes(kind, position) for kind in LayerKind)


def kind_of(binding: PackBinding) -> Kind:
    """The digests of what ``binding`` stands for."""
    numerics = blake3(encode_numerics(binding.numerics)).digest()
    identity = blake3(binding.header.identity_digest + binding.header.layout_digest).digest()
    return Kind(identity, numerics)


@dataclass(frozen=True, slots=True)
class Describing:
    """What does not change of a node while it runs, and where the rest is found.

    Attributes:
        sessions: What it has.
        kind: What it computes, and on what.
        layout: The shape of its rows.
        capacity_bytes: KV memory that it gives to sessions.
        address: Where others reach it for gRPC.
        http: Where clients reach it for HTTP; empty: nowhere.
    """

    sessions: Sessions
    kind: Kind
    layout: CacheLayout
    capacity_bytes: int
    address: Address
    http: str = ""

    def now(self) -> NodeState:
        """How it stands."""
        held = self.sessions.all()
        # The rows of a sleeping session are on disk; it wakes only while others may sleep.
        taken = sum(row_bytes(self.layout, one.next_index) for one in held if not one.asleep)
        return NodeState(
            self.sessions.node, self.kind, self.capacity_bytes,
            max(0, self.capacity_bytes - taken), len(held), SESSIONS_MAX,
            self.sessions.leaving, address=str(self.address), http=self.http,
        )  # fmt: skip
