"""What can go wrong in a node, below the one root of :mod:`kvpack.errors`.

``reason`` is a stable word for programs; :mod:`node.status` gives each class its gRPC code. No
message holds tokens, text or keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from kvpack.errors import (
    EXIT_MISMATCH,
    EXIT_NOT_AUTHENTIC,
    EXIT_USAGE,
    IdentityMismatchError,
    KvpackError,
    LayoutMismatchError,
)

#: Trailer of a move that failed: the stable word of what it failed for.
CAUSE_KEY: Final = "kvpack-cause"

#: What a command ends with EXIT_MISMATCH for, also where another node found it.
_MISMATCHES: Final = (LayoutMismatchError, IdentityMismatchError)


class NodeError(KvpackError):
    """Root of the errors that only a node raises."""

    reason: ClassVar[str] = "node_failure"


class UsageError(NodeError):
    """A command was given something that it cannot work with: a file, an address, a number."""

    reason = "usage"
    exit_code = EXIT_USAGE


class ListenError(NodeError):
    """The address cannot be bound: in use, not ours, not permitted."""

    reason = "cannot_listen"


class VolumeError(NodeError):
    """The data folder's volume refuses durable writes, or takes too long over them."""

    reason = "slow_volume"


class FolderInUseError(NodeError):
    """Another process of this program serves from the data folder."""

    reason = "folder_in_use"


class CredentialsError(NodeError):
    """A credentials folder is not usable: a file is missing, readable by others, a link."""

    reason = "bad_credentials"


class PeerRefusedError(NodeError):
    """The peer's certificate is signed, but is not pinned for what it asks.

    Why is for this node's log; the peer learns nothing but that it was refused.
    """

    reason = "peer_refused"
    exit_code = EXIT_NOT_AUTHENTIC


class PairError(NodeError):
    """Two machines were not paired: hung up, too late, or they do not fit. Nothing was kept."""

    reason = "not_paired"


class PairRefusedError(PairError):
    """Pairing was stopped because the other side may be another one than it says."""

    reason = "pairing_refused"
    exit_code = EXIT_NOT_AUTHENTIC


class PeerUnavailableError(NodeError):
    """The other node did not answer, or answered with a failure of its own."""

    reason = "peer_unavailable"


class PeerAnswerError(NodeError):
    """The other node refused.

    Attributes:
        peer_reason: Its stable word; the message is its sentence.
        hints: What it said beside: where to go instead, and after how long to come again.
    """

    reason = "refused_by_peer"

    def __init__(
        self, peer_reason: str, message: str, hints: Mapping[str, str] | None = None
    ) -> None:
        self.peer_reason = peer_reason
        self.hints = dict(hints or {})
        super().__init__(message)


def cause_of(error: KvpackError) -> str:
    """The stable word of what a move failed for, at whichever end; empty: nothing is behind it."""
    cause = error.__cause__ if isinstance(error, TransferFailedError) else None
    if isinstance(cause, PeerAnswerError):
        return cause.peer_reason
    return cause.reason if isinstance(cause, KvpackError) else ""


def exit_code_of(error: KvpackError) -> int:
    """What a command ends with: a mismatch is one, whichever node found it."""
    if isinstance(error, PeerAnswerError):
        words = (error.peer_reason, error.hints.get(CAUSE_KEY, ""))
        if any(kind.reason in words for kind in _MISMATCHES):
            return EXIT_MISMATCH
    return error.exit_code


class SessionNotFoundError(NodeError):
    """No session of that id on this node."""

    reason = "session_not_found"


class PackNotFoundError(NodeError):
    """No pack of that name in the folder."""

    reason = "pack_not_found"


class SessionMovedError(SessionNotFoundError):
    """Another node owns the session. ``owner`` and ``address`` are empty where not known here."""

    reason = "session_moved"

    def __init__(self, session_id: str, owner: str, address: str) -> None:
        self.session_id = session_id
        self.owner = owner
        self.address = address
        where = f"owned by node {owner}" if owner else "moved away"
        if owner.startswith("store."):
            where = f"lies in {owner}; kvnode session restore brings it back"
        super().__init__(f"session {session_id}: {where}")


class SessionExistsError(NodeError):
    """The session id is taken."""

    reason = "session_exists"


class SessionFrozenError(NodeError):
    """The session is being handed over. Retry: soon it serves here again or on its new owner."""

    reason = "session_frozen"


class SessionStateError(NodeError):
    """The session cannot do that now: nothing to generate from, context full, already moving."""

    reason = "session_state"


class StaleTokenError(NodeError):
    """The ownership token is not the current one: somebody else owns, or owned, since."""

    reason = "stale_token"


class FencedError(NodeError):
    """This node's lease is over, so another may own its sessions: it serves none of them.

    Retry: it serves again once its lease is renewed, if the directory still names it the owner.
    """

    reason = "fenced"


class LeaseLiveError(NodeError):
    """The owner's lease still runs: its session is not to be taken over. Says for how long."""

    reason = "lease_live"


class LeaseLostError(NodeError):
    """Another process registered under this node's name: this one must not serve any more."""

    reason = "lease_lost"


class NodeBusyError(NodeError):
    """A bound was reached: sessions, transfers, waiting calls. Retry later."""

    reason = "busy"


class OverloadedError(NodeError):
    """As many answers wait as may. Retry after ``retry_after_s`` seconds, which is a guess."""

    reason = "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class StagingBusyError(OverloadedError):
    """The one place where a context is computed beside the live ones is taken. Nothing began."""

    reason = "staging_busy"


class DrainingError(NodeError):
    """The node is about to stop and takes no new work; what ran too long was ended."""

    reason = "draining"


class UnhealthyError(NodeError):
    """What the engine holds is uncertain since a call went wrong: nothing is served any more.

    Only a restart helps.
    """

    reason = "unhealthy"


class RunCancelledError(NodeError):
    """The answer was cancelled, by whoever asked for it or because nobody was there any more."""

    reason = "cancelled"


class StalledReaderError(RunCancelledError):
    """The answer was cancelled since it was not read for longer than a slot waits."""

    reason = "stalled_reader"


class TransferNotFoundError(NodeError):
    """No transfer of that number from that source."""

    reason = "transfer_not_found"


class TransferStateError(NodeError):
    """The transfer is in a state in which that message is refused."""

    reason = "transfer_state"


class TransferFailedError(NodeError):
    """A move did not come about; the message says in which state both sides are left."""

    reason = "transfer_failed"


class ReplayError(NodeError):
    """The transfer number was used before, for something else or to its end."""

    reason = "replayed"


class InventoryError(NodeError):
    """What was pushed is not what was announced: a chunk is missing, twice, strange or late."""

    reason = "inventory"


class ConsentError(NodeError):
    """The numerics differ, so a continuation can only be ``compatible``; nobody consented."""

    reason = "consent_needed"
    exit_code = EXIT_MISMATCH


class ProtocolVersionError(NodeError):
    """The two nodes have no version of the protocol in common, or a transfer began by another one.

    Nothing was moved: the session stays where it is. Upgrade the older of the two.
    """

    reason = "protocol_version"


class ProbeError(NodeError):
    """Numerics are equal, yet the boundary call gave other logits: nothing was installed."""

    reason = "probe_mismatch"
    exit_code = EXIT_MISMATCH


class ProducerCheckError(NodeError):
    """Rows of another backend are not those that the model folder says: nothing was served.

    Attributes:
        field: Layer, role and what of them, such as ``layers[0].keys: rope layout``.
        expected: What the layout says.
        found: What the rows look like.
    """

    reason = "producer_check"
    exit_code = EXIT_MISMATCH

    def __init__(self, field: str, expected: object, found: object) -> None:
        self.field, self.expected, self.found = field, expected, found
        super().__init__(f"{field}: expected {expected}, found {found}")


class BackendFailedError(NodeError):
    """What computes failed in a call. Nothing of the call was kept; the session is as before it."""

    reason = "backend_failed"


class MemoryLackingError(NodeError):
    """A call needs more memory than there is. Nothing of it was kept, nor is reserved for it.

    A session that is closed gives its memory back; a shorter prompt takes less.
    """

    reason = "out_of_memory"


class ContextLengthError(NodeError):
    """A conversation or prompt does not fit into the context, and may not or cannot be shortened.

    Attributes:
        limit_tokens: What the context holds.
        needed_tokens: What the smallest form of it would take, the answer's reserve included.
    """

    reason = "context_length"

    def __init__(self, message: str, limit_tokens: int, needed_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self.needed_tokens = needed_tokens
        super().__init__(message)


class DirectoryError(NodeError):
    """The directory could not be read or written; nothing was changed."""

    reason = "directory_unavailable"


class DirectoryAmbiguousError(DirectoryError):
    """A write to the directory may or may not have happened: settle it by nonce and re-read."""

    reason = "directory_ambiguous"


class DirectoryWentBackError(DirectoryError):
    """The directory is older than what this node has seen of it: restored, and not adopted.

    ``kvnode directory adopt`` makes every earlier token stale, and then it may be used again.
    """

    reason = "directory_went_back"


class JournalError(NodeError):
    """The transfer journal could not be read or written."""

    reason = "journal_unavailable"
