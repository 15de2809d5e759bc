"""Which version of the protocol two nodes speak with one another. Functions of what both say.

The rules are in ``docs/spec/migration-v1.md``, section 13. The major version is the name of the
gRPC package; a *minor* only adds. Prepare carries what the source speaks, its answer what was
chosen, and the target's journal keeps that for as long as the transfer is open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import kvpack
from kvpack import limits
from kvpack.errors import LimitError
from node.errors import ProtocolVersionError
from node.pb.v1 import migration_pb2, protocol_pb2

MAJOR: Final = 1

#: One minor for each release that changes what is sent: a thousand are never reached, and a
#: number beyond is no version.
MINOR_MAX: Final = 999

#: The version in which nobody says a version.
FIRST: Final = 0

#: From here on the target names its program, and Seal repeats what was chosen.
NAMED: Final = 1

#: From here on Prepare may ask for another data plane, and its answer and Status say more.
PLANES: Final = 2


@dataclass(frozen=True, slots=True)
class Minors:
    """The minor versions that a node speaks, from ``lowest`` to ``highest``, both included.

    Raises:
        LimitError: One is outside its range, or they are the wrong way round.
    """

    lowest: int
    highest: int

    def __post_init__(self) -> None:
        limits.check_range("protocol.highest_minor", self.highest, 0, MINOR_MAX)
        if not 0 <= self.lowest <= self.highest:
            raise LimitError("protocol.lowest_minor", f"0 to {self.highest}", self.lowest)

    def __contains__(self, minor: int) -> bool:
        return self.lowest <= minor <= self.highest

    def __str__(self) -> str:
        return f"{named(self.lowest)} to {named(self.highest)}"


#: What this build speaks: its own version and, at least, that of the release before.
OURS: Final = Minors(FIRST, PLANES)

#: What somebody speaks who does not say.
UNSAID: Final = Minors(FIRST, FIRST)


@dataclass(frozen=True, slots=True)
class Speaker:
    """One end of a transfer: its name, what it speaks, and the version of its program, if known."""

    node: str
    minors: Minors
    version: str = ""

    def __post_init__(self) -> None:
        if self.version:
            limits.check_name("node_version", self.version)

    def __str__(self) -> str:
        program = f", kvpack {self.version}" if self.version else ""
        return f"{self.minors} (node {self.node}{program})"


def named(minor: int) -> str:
    """A version as people write it."""
    return f"{MAJOR}.{minor}"


def choose(target: Speaker, source: Speaker) -> int:
    """The highest minor that both speak.

    Raises:
        ProtocolVersionError: There is none.
    """
    minor = min(target.minors.highest, source.minors.highest)
    if minor not in target.minors or minor not in source.minors:
        raise ProtocolVersionError(
            f"prepare.protocol: expected one of {target}, found {source}; "
            "a release between the two moves sessions with both"
        )
    return minor


def require_kept(target: Speaker, minor: int, transfer: str) -> int:
    """Return ``minor``, by which a transfer began before a restart, if it can go on by it.

    Raises:
        ProtocolVersionError: This node does not speak it any more, or not yet.
    """
    if minor not in target.minors:
        raise ProtocolVersionError(
            f"{transfer}: expected a version of {target}, found {named(minor)}, by which it began"
        )
    return minor


def require_answer(
    source: Speaker, node: str, reply: migration_pb2.PrepareReply, before: int | None
) -> int:
    """The version that the target chose, if it may be spoken.

    Args:
        source: What was offered.
        node: The target's name.
        reply: Its answer.
        before: What it chose when this transfer was prepared first; None: this is the first time.

    Raises:
        ProtocolVersionError: It is none of those offered, or another than before.
    """
    minor: int = reply.protocol_minor
    if minor not in source.minors:
        # Also a peer from before versions were said, which takes an offer that it cannot read.
        raise ProtocolVersionError(
            f"prepare_reply.protocol_minor: expected one of {source}, "
            f"found {named(minor)} (node {node})"
        )
    if before is not None and minor != before:
        raise ProtocolVersionError(
            f"prepare_reply.protocol_minor: expected {named(before)}, by which the transfer began, "
            f"found {named(minor)} (node {node})"
        )
    return minor


def require_sealed(minor: int, found: int) -> None:
    """Refuse a Seal by another version than the transfer's. Before 1.1 it names none.

    Raises:
        ProtocolVersionError: They differ.
    """
    if found != minor:
        raise ProtocolVersionError(
            f"seal.protocol_minor: expected {named(minor)}, found {named(found)}"
        )


def read_minors(said: protocol_pb2.ProtocolRange) -> Minors:
    """The range that ``said`` stands for. An empty one is what nobody said.

    Raises:
        LimitError: It is none.
    """
    return Minors(said.lowest_minor, said.highest_minor)


def minors_message(minors: Minors) -> protocol_pb2.ProtocolRange:
    """``minors`` as a message."""
    return protocol_pb2.ProtocolRange(lowest_minor=minors.lowest, highest_minor=minors.highest)


def here(node: str, minors: Minors) -> Speaker:
    """This node."""
    return Speaker(node, minors, kvpack.__version__)


def state(request: migration_pb2.PrepareRequest, source: Speaker) -> None:
    """Write into ``request`` what its source speaks. One that speaks 1.0 alone says nothing."""
    if source.minors != UNSAID:
        request.protocol.CopyFrom(minors_message(source.minors))
        request.node_version = source.version


def answer(reply: migration_pb2.PrepareReply, minor: int) -> None:
    """Write into ``reply`` what was chosen. By 1.0 it is the answer that 1.0 always gave."""
    if minor >= NAMED:
        reply.protocol_minor = minor
        reply.node_version = kvpack.__version__
