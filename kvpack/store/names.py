"""Names of objects: a kind, then keyed ids in hex. Never text, tokens, people or sessions.

::

    chunks/SEAL                          one sealed chunk that this node made or recomputed
    peer/CUT-SEAL                        the same, as a peer sent it, for that peer's cut alone
    cuts/CUT                             header and manifest of one cut; CUT is the manifest's MAC
    holds/LINEAGE-POSITION-KIND-CUT-TIME why a cut is kept, and since when; empty
    nodes/LINK-PARENT                    one link of the prefix chain; empty
    entries/H/LINK-REST-TAIL-CUT         a cut that lies REST tokens after LINK; empty
    intents/WRITER-NUMBER                what a writer relies on
    sweeps/COLLECTOR                     what a collector is about to delete

All letters are lower case, so a volume that folds case changes nothing.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from kvpack import limits
from kvpack.errors import FormatError

CHUNKS: Final = "chunks"
PEER: Final = "peer"
CUTS: Final = "cuts"
HOLDS: Final = "holds"
NODES: Final = "nodes"
ENTRIES: Final = "entries"
INTENTS: Final = "intents"
SWEEPS: Final = "sweeps"

#: Folders of a store, in the order in which they are made.
KINDS: Final = (CHUNKS, PEER, CUTS, HOLDS, NODES, ENTRIES, INTENTS, SWEEPS)

#: Only this kind is looked up by the beginning of its names, so only it is spread over folders,
#: by the first digit. A session has one entry for each retained cut.
SHARDED: Final = ENTRIES
SHARDS: Final = tuple("0123456789abcdef")

LINEAGE_BYTES: Final = 16
WRITER_BYTES: Final = 16
TAIL_BYTES: Final = 16
IDENTITY_BYTES: Final = 16
SEQUENCE_MAX: Final = (1 << 32) - 1
STAMP_MAX: Final = (1 << 40) - 1

_ID: Final = "[0-9a-f]{64}"
_SHORT: Final = "[0-9a-f]{32}"
_PATTERNS: Final = {
    CHUNKS: _ID,
    PEER: f"{_ID}-{_ID}",
    CUTS: _ID,
    HOLDS: f"{_SHORT}-[0-9a-f]{{7}}-[cptim]-{_ID}-[0-9a-f]{{10}}",
    NODES: f"{_ID}-{_ID}",
    ENTRIES: f"[0-9a-f]/{_ID}-[0-9a-f]{{2}}-{_SHORT}-{_ID}",
    INTENTS: f"{_SHORT}-[0-9a-f]{{8}}",
    SWEEPS: _SHORT,
}
_NAME: Final = re.compile("|".join(f"{kind}/{text}" for kind, text in _PATTERNS.items()))


def is_object_name(name: str) -> bool:
    """Whether ``name`` can be an object's."""
    return _NAME.fullmatch(name) is not None


def check_object_name(name: str) -> str:
    """Return ``name`` if it can be an object's. Everything else never reaches a disk.

    Raises:
        FormatError: It is not of the one form that names have.
    """
    if not is_object_name(name):
        raise FormatError("store.name", "kind/lower-case hex", f"{len(name)} other characters")
    return name


def kind_of(name: str) -> str:
    """The kind of an object's name."""
    return name.partition("/")[0]


def chunk_name(seal_id: bytes) -> str:
    """Name of a chunk that this node made or recomputed."""
    return f"{CHUNKS}/{seal_id.hex()}"


def peer_prefix(cut_id: bytes) -> str:
    """Beginning of the names of all chunks that came from a peer for one cut."""
    return f"{PEER}/{cut_id.hex()}-"


def peer_name(cut_id: bytes, seal_id: bytes) -> str:
    """Name of a chunk that a peer sent, as long as its content id was not recomputed."""
    return peer_prefix(cut_id) + seal_id.hex()


def peer_ids(name: str) -> tuple[bytes, bytes]:
    """``(cut_id, seal_id)`` of a peer chunk's name."""
    cut, seal = name.partition("/")[2].split("-")
    return bytes.fromhex(cut), bytes.fromhex(seal)


def cut_name(cut_id: bytes) -> str:
    """Name of a cut: its manifest's MAC."""
    return f"{CUTS}/{cut_id.hex()}"


def cut_id_of(name: str) -> bytes:
    """The id of a cut's name."""
    return bytes.fromhex(name.partition("/")[2])


def node_name(link: bytes, parent: bytes) -> str:
    """Name of one link of the prefix chain. It carries its parent, so that no key is needed to
    tell which links a cut still needs."""
    return f"{NODES}/{link.hex()}-{parent.hex()}"


def node_links(name: str) -> tuple[str, str]:
    """``(link, parent)`` of a node's name, in hex."""
    link, parent = name.partition("/")[2].split("-")
    return link, parent


def node_ids(name: str) -> bytes:
    """Link and parent of a node's name, joined."""
    return bytes.fromhex(name.partition("/")[2].replace("-", ""))


def intent_name(writer_id: bytes, sequence: int) -> str:
    """Name of a writer's record number ``sequence``."""
    return f"{INTENTS}/{writer_id.hex()}-{sequence:08x}"


def intent_parts(name: str) -> tuple[bytes, int]:
    """``(writer_id, sequence)`` of an intent record's name."""
    writer, sequence = name.partition("/")[2].split("-")
    return bytes.fromhex(writer), int(sequence, 16)


def sweep_name(collector_id: bytes) -> str:
    """Name of what a collector is about to delete."""
    return f"{SWEEPS}/{collector_id.hex()}"


class HoldKind(enum.Enum):
    """Why a cut was made. The retention rule asks for it.

    MOVED: the session itself lies here and nowhere else. Only whoever takes it away again deletes
    such a hold; no collector does, however short room is.
    """

    CADENCE = "c"
    PROMPT = "p"
    TURN = "t"
    IMPORT = "i"
    MOVED = "m"


@dataclass(frozen=True, slots=True)
class Hold:
    """One reason to keep one cut: while a hold is there, no collector takes the cut.

    Attributes:
        stamp: When the cut was made or last used, seconds since 1970, by the caller's clock.
        position: Of the cut; a position is public, its tokens are not.
        lineage: 16 bytes: all cuts of one session. Random or keyed, never a session's name.
        kind: Why the cut was made.
        cut_id: Which cut.

    Raises:
        LimitError: A field is outside its cap.
        FormatError: The lineage or the cut id has another length.
    """

    stamp: int
    position: int
    lineage: bytes
    kind: HoldKind
    cut_id: bytes

    def __post_init__(self) -> None:
        limits.check_range("hold.stamp", self.stamp, 0, STAMP_MAX)
        limits.check_range("hold.position", self.position, 0, limits.POSITION_MAX)
        check_bytes("hold.lineage", self.lineage, LINEAGE_BYTES)
        check_bytes("hold.cut_id", self.cut_id, 32)

    @property
    def name(self) -> str:
        """The hold's name, which is all there is of it."""
        return (
            f"{lineage_prefix(self.lineage)}{self.position:07x}-{self.kind.value}-"
            f"{self.cut_id.hex()}-{self.stamp:010x}"
        )


def lineage_prefix(lineage: bytes) -> str:
    """Beginning of the names of all holds of one session."""
    return f"{HOLDS}/{lineage.hex()}-"


def parse_hold(name: str) -> Hold:
    """The hold of a name.

    Raises:
        FormatError: Not a hold's name; also LimitError.
    """
    if kind_of(check_object_name(name)) != HOLDS:
        raise FormatError("store.name", "a hold", kind_of(name))
    lineage, position, kind, cut_id, stamp = name.partition("/")[2].split("-")
    return Hold(
        stamp=int(stamp, 16),
        position=int(position, 16),
        lineage=bytes.fromhex(lineage),
        kind=HoldKind(kind),
        cut_id=bytes.fromhex(cut_id),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A cut's place in the prefix chain.

    Attributes:
        link: The last whole block's link, 32 bytes.
        rest: Tokens after it, 0 to 255.
        tail: First 16 bytes of the keyed tail over those tokens.
        cut_id: Which cut.

    Raises:
        LimitError: ``rest`` is outside its cap.
        FormatError: An id has another length.
    """

    link: bytes
    rest: int
    tail: bytes
    cut_id: bytes

    def __post_init__(self) -> None:
        check_bytes("entry.link", self.link, 32)
        limits.check_range("entry.rest", self.rest, 0, limits.GRID_TOKENS - 1)
        check_bytes("entry.tail", self.tail, TAIL_BYTES)
        check_bytes("entry.cut_id", self.cut_id, 32)

    @property
    def name(self) -> str:
        """The entry's name, which is all there is of it."""
        return f"{entries_prefix(self.link)}{self.rest:02x}-{self.tail.hex()}-{self.cut_id.hex()}"


def entries_prefix(link: bytes) -> str:
    """Beginning of the names of all cuts that lie in the block after ``link``."""
    text = link.hex()
    return f"{ENTRIES}/{text[0]}/{text}-"


def link_of_prefix(prefix: str) -> bytes:
    """The link of what :func:`entries_prefix` gave."""
    return bytes.fromhex(prefix.rpartition("/")[2].rstrip("-"))


def parse_entry(name: str) -> Entry:
    """The entry of a checked name."""
    link, rest, tail, cut_id = name.rpartition("/")[2].split("-")
    return Entry(bytes.fromhex(link), int(rest, 16), bytes.fromhex(tail), bytes.fromhex(cut_id))


def check_bytes(field: str, value: bytes, length: int) -> bytes:
    """Return ``value`` if it has ``length`` bytes.

    Raises:
        FormatError: It has another length.
    """
    if len(value) != length:
        raise FormatError(field, f"{length} bytes", f"{len(value)} bytes")
    return value
