"""What a node says of itself, as a small value of the directory.

It is kept with an entry that the node claims at its start, like that of a session, and is written
under that entry's token: so nobody but the node writes it, a process that was replaced cannot, and
every directory keeps it without knowing what it is. Whether the node runs is not in it: its lease
tells. The entry's name is drawn from the node's, and begins like those of remote prefills, which
are nobody's after a restart: a start gives up the one before, and lists leave it out.

It is not proof of anything. A wrong one costs a move that its target refuses at Prepare.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from kvpack.errors import FormatError, LimitError
from node.config import Address
from node.directory import VALUE_BYTES_MAX
from node.errors import UsageError
from node.placement.values import Kind, NodeState
from node.transient import PREFIX

FORMAT: Final = 1


class _Notice(msgspec.Struct, frozen=True):
    """The value as JSON: an operator can read it. Fields that are not known are passed over."""

    format: int
    node: str
    address: str
    http: str
    identity: bytes
    numerics: bytes
    capacity_bytes: int
    free_bytes: int
    sessions: int
    sessions_max: int
    leaving: bool


def notice_name(node: str) -> str:
    """The name of the entry that the notice of ``node`` is kept with."""
    digest = hashlib.sha256(b"kvnode notice\0" + node.encode()).hexdigest()
    return f"{PREFIX}node.{digest[:32]}"


def encode_notice(state: NodeState) -> bytes:
    """What ``state`` says of itself; without its lease.

    Raises:
        LimitError: Longer than a directory keeps.
    """
    encoded = msgspec.json.encode(
        _Notice(
            FORMAT, state.name, state.address, state.http, state.kind.identity,
            state.kind.numerics, state.capacity_bytes, state.free_bytes, state.sessions,
            state.sessions_max, state.leaving,
        )
    )  # fmt: skip
    if len(encoded) > VALUE_BYTES_MAX:
        raise LimitError("notice", f"at most {VALUE_BYTES_MAX} bytes", len(encoded))
    return encoded


def decode_notice(node: str, content: bytes, lease_left_s: float) -> NodeState:
    """What ``node`` said of itself.

    Raises:
        FormatError: It is none, or another node's.
        LimitError: A field is outside its range.
    """
    if len(content) > VALUE_BYTES_MAX:
        raise LimitError("notice", f"at most {VALUE_BYTES_MAX} bytes", len(content))
    try:
        notice = msgspec.json.decode(content, type=_Notice)
        address = str(Address.parse(notice.address))
    except (msgspec.ValidationError, msgspec.DecodeError, UsageError) as error:
        raise FormatError("notice", "what a node says of itself", type(error).__name__) from None
    if notice.format != FORMAT or notice.node != node:
        found = f"format {notice.format} of another node"
        raise FormatError("notice", f"format {FORMAT} of node {node}", found)
    return NodeState(
        node, Kind(notice.identity, notice.numerics), notice.capacity_bytes,
        notice.free_bytes, notice.sessions, notice.sessions_max, notice.leaving,
        lease_left_s, address, notice.http,
    )  # fmt: skip
