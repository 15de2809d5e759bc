"""The protocol as data: states x events -> next state and effect. No I/O, no clock, no randomness.

Two machines, one for each end (a source has one table for moves and one for copies). A pair that
is not in a table is refused, and refusing changes nothing. The drivers
(:mod:`node.migration.source`, :mod:`node.migration.target`) perform an effect and feed back the
event that came of it; they decide nothing by themselves.

Both machines turn on one key of the directory. The target's TRANSFER and the source's RAISE are
compare-and-swaps from the same token, so exactly one of them happens: that is what decides between
Commit and Abort, and it needs no message to arrive. For a copy the target's TRANSFER starts
from its own claim and ends at itself: the same write, the same nonce, the same recovery.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from node.errors import TransferStateError


class TargetState(enum.Enum):
    """Where a transfer stands on the node that receives it."""

    NONE = "none"  # unknown here
    OPEN = "open"  # prepared; chunks may arrive
    SEALED = "sealed"  # everything arrived and passed the gate; nothing is visible yet
    PROBING = "probing"  # the boundary call runs in the detached generation
    PUBLISHING = "publishing"  # the pack is being made durable
    TRANSFERRING = "transferring"  # the compare-and-swap is under way
    UNSETTLED = "unsettled"  # it may or may not have happened; nobody serves
    COMMITTED = "committed"  # the session lives here
    ABORTED = "aborted"  # nothing of it is left


class TargetEvent(enum.Enum):
    """What happens to a transfer on the target."""

    PREPARE = "prepare"
    PREPARE_AGAIN = "prepare_again"  # the same bytes as before
    RELOAD = "reload"  # this node restarted; what its spool holds of the transfer is taken again
    SUPERSEDED = "superseded"  # the source restarted, and offers the same session anew
    PIECE = "piece"  # a stream was opened, or a chunk passed its checks
    PIECE_BAD = "piece_bad"
    SEAL = "seal"  # with a manifest that passed the gate
    SEAL_BAD = "seal_bad"
    COMMIT = "commit"
    PROBE_GOOD = "probe_good"
    PROBE_BAD = "probe_bad"
    PUBLISHED = "published"
    PUBLISH_FAILED = "publish_failed"
    CAS_WON = "cas_won"
    CAS_LOST = "cas_lost"
    CAS_UNKNOWN = "cas_unknown"
    ABORT = "abort"
    LEASE_OVER = "lease_over"  # no progress for the lease


class TargetEffect(enum.Enum):
    """What the target has to do on a step."""

    RESERVE = "reserve"  # ledger entry, memory, spool file
    ANSWER = "answer"  # say what is known; change nothing
    RECEIVE = "receive"  # open, scatter, spool
    PROBE = "probe"
    PUBLISH = "publish"
    TRANSFER = "transfer"
    SETTLE = "settle"  # read the directory by nonce; write again where that is still possible
    SWAP = "swap"  # the generation becomes the session's: cannot fail
    DISCARD = "discard"  # free memory, remove the spool


class SourceState(enum.Enum):
    """Where a move stands on the node that gives the session away."""

    IDLE = "idle"  # the session serves
    PREPARING = "preparing"  # it serves
    STREAMING = "streaming"  # it prefills; a failure only ends the move
    SEALING = "sealing"  # frozen from here
    REOPENING = "reopening"  # still frozen: the link broke at the seal; what does the target hold?
    REFILLING = "refilling"  # still frozen: what the target lost is sent again
    COMMITTING = "committing"
    READING = "reading"  # asks the directory who owns it
    RAISING = "raising"  # compare-and-swap of its own, to resume
    KEPT = "kept"  # the move ended before the freeze: the session serves under its old token
    RESUMED = "resumed"  # it serves under a new token; the target's compare-and-swap fails
    RELEASED = "released"  # the directory says that another node owns it
    ASKING = "asking"  # a copy: no answer to Commit; Status tells what became of it
    COPIED = "copied"  # a copy: the target serves its own session; this one serves on


class SourceEvent(enum.Enum):
    """What happens to a move on the source."""

    START = "start"
    PREPARED = "prepared"
    PREPARE_CUT = "prepare_cut"  # no answer, though there was one before: ask again
    PREPARE_FAILED = "prepare_failed"
    PUSHED = "pushed"
    PUSH_CUT = "push_cut"  # the link broke: the target may hold what it has
    PUSH_FAILED = "push_failed"
    SEALED = "sealed"
    SEAL_CUT = "seal_cut"  # no answer
    SEAL_FAILED = "seal_failed"
    COMMIT_ANSWERED = "commit_answered"
    COMMIT_FAILED = "commit_failed"
    OWNER_OTHER = "owner_other"
    OWNER_SELF = "owner_self"
    RAISED = "raised"
    RAISE_LOST = "raise_lost"
    DIRECTORY_DOWN = "directory_down"
    TARGET_COMMITTED = "target_committed"  # a copy: says Status
    TARGET_ABORTED = "target_aborted"
    TARGET_SILENT = "target_silent"


class SourceEffect(enum.Enum):
    """What the source has to do on a step."""

    PREPARE = "prepare"
    STREAM = "stream"
    SEAL = "seal"  # freeze the session, then send Seal
    COMMIT = "commit"
    READ_OWNER = "read_owner"
    RAISE = "raise"
    WAIT = "wait"  # the directory is away: stay frozen, try again
    ABORT = "abort"  # tell the target, once, without waiting for luck
    THAW = "thaw"  # serve under the new token, then as ABORT
    RELEASE = "release"  # drop the session's state
    ASK_STATUS = "ask_status"  # a copy: what became of it
    FINISH = "finish"  # a copy: nothing is left to do


_S = TypeVar("_S", bound=enum.Enum)
_E = TypeVar("_E", bound=enum.Enum)
_F = TypeVar("_F", bound=enum.Enum)


@dataclass(frozen=True, slots=True)
class Step(Generic[_S, _F]):
    """What a pair of state and event leads to."""

    state: _S
    effect: _F


_T, _TE, _TF = TargetState, TargetEvent, TargetEffect

TARGET: Final[Mapping[tuple[TargetState, TargetEvent], Step[TargetState, TargetEffect]]] = {
    (_T.NONE, _TE.PREPARE): Step(_T.OPEN, _TF.RESERVE),
    (_T.NONE, _TE.RELOAD): Step(_T.OPEN, _TF.RESERVE),
    (_T.OPEN, _TE.PREPARE_AGAIN): Step(_T.OPEN, _TF.ANSWER),
    (_T.OPEN, _TE.PIECE): Step(_T.OPEN, _TF.RECEIVE),
    (_T.OPEN, _TE.PIECE_BAD): Step(_T.ABORTED, _TF.DISCARD),
    (_T.OPEN, _TE.SEAL): Step(_T.SEALED, _TF.ANSWER),
    (_T.OPEN, _TE.SEAL_BAD): Step(_T.ABORTED, _TF.DISCARD),
    (_T.OPEN, _TE.ABORT): Step(_T.ABORTED, _TF.DISCARD),
    (_T.OPEN, _TE.SUPERSEDED): Step(_T.ABORTED, _TF.DISCARD),
    (_T.OPEN, _TE.LEASE_OVER): Step(_T.ABORTED, _TF.DISCARD),
    (_T.SEALED, _TE.PREPARE_AGAIN): Step(_T.SEALED, _TF.ANSWER),
    (_T.SEALED, _TE.SEAL): Step(_T.SEALED, _TF.ANSWER),
    (_T.SEALED, _TE.COMMIT): Step(_T.PROBING, _TF.PROBE),
    (_T.SEALED, _TE.ABORT): Step(_T.ABORTED, _TF.DISCARD),
    (_T.SEALED, _TE.SUPERSEDED): Step(_T.ABORTED, _TF.DISCARD),
    (_T.SEALED, _TE.LEASE_OVER): Step(_T.ABORTED, _TF.DISCARD),
    (_T.PROBING, _TE.PROBE_GOOD): Step(_T.PUBLISHING, _TF.PUBLISH),
    (_T.PROBING, _TE.PROBE_BAD): Step(_T.ABORTED, _TF.DISCARD),
    (_T.PUBLISHING, _TE.PUBLISHED): Step(_T.TRANSFERRING, _TF.TRANSFER),
    (_T.PUBLISHING, _TE.PUBLISH_FAILED): Step(_T.ABORTED, _TF.DISCARD),
    (_T.TRANSFERRING, _TE.CAS_WON): Step(_T.COMMITTED, _TF.SWAP),
    (_T.TRANSFERRING, _TE.CAS_LOST): Step(_T.ABORTED, _TF.DISCARD),
    (_T.TRANSFERRING, _TE.CAS_UNKNOWN): Step(_T.UNSETTLED, _TF.ANSWER),
    (_T.UNSETTLED, _TE.COMMIT): Step(_T.TRANSFERRING, _TF.SETTLE),
    (_T.UNSETTLED, _TE.ABORT): Step(_T.TRANSFERRING, _TF.SETTLE),
    (_T.UNSETTLED, _TE.LEASE_OVER): Step(_T.TRANSFERRING, _TF.SETTLE),
    (_T.COMMITTED, _TE.COMMIT): Step(_T.COMMITTED, _TF.ANSWER),
    (_T.COMMITTED, _TE.ABORT): Step(_T.COMMITTED, _TF.ANSWER),
    (_T.ABORTED, _TE.ABORT): Step(_T.ABORTED, _TF.ANSWER),
}  # fmt: skip

_S_, _SE, _SF = SourceState, SourceEvent, SourceEffect

SOURCE: Final[Mapping[tuple[SourceState, SourceEvent], Step[SourceState, SourceEffect]]] = {
    (_S_.IDLE, _SE.START): Step(_S_.PREPARING, _SF.PREPARE),
    (_S_.PREPARING, _SE.PREPARED): Step(_S_.STREAMING, _SF.STREAM),
    (_S_.PREPARING, _SE.PREPARE_CUT): Step(_S_.PREPARING, _SF.PREPARE),
    (_S_.PREPARING, _SE.PREPARE_FAILED): Step(_S_.KEPT, _SF.ABORT),
    (_S_.STREAMING, _SE.PUSHED): Step(_S_.SEALING, _SF.SEAL),
    (_S_.STREAMING, _SE.PUSH_CUT): Step(_S_.PREPARING, _SF.PREPARE),
    (_S_.STREAMING, _SE.PUSH_FAILED): Step(_S_.KEPT, _SF.ABORT),
    (_S_.SEALING, _SE.SEALED): Step(_S_.COMMITTING, _SF.COMMIT),
    (_S_.SEALING, _SE.SEAL_CUT): Step(_S_.REOPENING, _SF.PREPARE),
    (_S_.SEALING, _SE.SEAL_FAILED): Step(_S_.READING, _SF.READ_OWNER),
    (_S_.REOPENING, _SE.PREPARED): Step(_S_.REFILLING, _SF.STREAM),
    (_S_.REOPENING, _SE.PREPARE_CUT): Step(_S_.REOPENING, _SF.PREPARE),
    (_S_.REOPENING, _SE.PREPARE_FAILED): Step(_S_.READING, _SF.READ_OWNER),
    (_S_.REFILLING, _SE.PUSHED): Step(_S_.SEALING, _SF.SEAL),
    (_S_.REFILLING, _SE.PUSH_CUT): Step(_S_.REOPENING, _SF.PREPARE),
    (_S_.REFILLING, _SE.PUSH_FAILED): Step(_S_.READING, _SF.READ_OWNER),
    # An answer to Commit proves nothing: only the directory does.
    (_S_.COMMITTING, _SE.COMMIT_ANSWERED): Step(_S_.READING, _SF.READ_OWNER),
    (_S_.COMMITTING, _SE.COMMIT_FAILED): Step(_S_.READING, _SF.READ_OWNER),
    (_S_.READING, _SE.OWNER_OTHER): Step(_S_.RELEASED, _SF.RELEASE),
    (_S_.READING, _SE.OWNER_SELF): Step(_S_.RAISING, _SF.RAISE),
    (_S_.READING, _SE.DIRECTORY_DOWN): Step(_S_.READING, _SF.WAIT),
    (_S_.RAISING, _SE.RAISED): Step(_S_.RESUMED, _SF.THAW),
    (_S_.RAISING, _SE.RAISE_LOST): Step(_S_.READING, _SF.READ_OWNER),
    (_S_.RAISING, _SE.DIRECTORY_DOWN): Step(_S_.READING, _SF.WAIT),
}  # fmt: skip

#: A copy hands no ownership over: the source serves all along, and its target's own Commit decides
#: about the target's own session. So there is nothing to freeze, to raise or to release.
COPY: Final[Mapping[tuple[SourceState, SourceEvent], Step[SourceState, SourceEffect]]] = {
    (_S_.IDLE, _SE.START): Step(_S_.PREPARING, _SF.PREPARE),
    (_S_.PREPARING, _SE.PREPARED): Step(_S_.STREAMING, _SF.STREAM),
    (_S_.PREPARING, _SE.PREPARE_CUT): Step(_S_.PREPARING, _SF.PREPARE),
    (_S_.PREPARING, _SE.PREPARE_FAILED): Step(_S_.KEPT, _SF.ABORT),
    (_S_.STREAMING, _SE.PUSHED): Step(_S_.SEALING, _SF.SEAL),
    (_S_.STREAMING, _SE.PUSH_CUT): Step(_S_.PREPARING, _SF.PREPARE),
    (_S_.STREAMING, _SE.PUSH_FAILED): Step(_S_.KEPT, _SF.ABORT),
    (_S_.SEALING, _SE.SEALED): Step(_S_.COMMITTING, _SF.COMMIT),
    (_S_.SEALING, _SE.SEAL_CUT): Step(_S_.PREPARING, _SF.PREPARE),
    (_S_.SEALING, _SE.SEAL_FAILED): Step(_S_.KEPT, _SF.ABORT),
    (_S_.COMMITTING, _SE.COMMIT_ANSWERED): Step(_S_.COPIED, _SF.FINISH),
    (_S_.COMMITTING, _SE.COMMIT_FAILED): Step(_S_.ASKING, _SF.ASK_STATUS),
    (_S_.ASKING, _SE.TARGET_COMMITTED): Step(_S_.COPIED, _SF.FINISH),
    (_S_.ASKING, _SE.TARGET_ABORTED): Step(_S_.KEPT, _SF.ABORT),
    (_S_.ASKING, _SE.TARGET_SILENT): Step(_S_.KEPT, _SF.ABORT),
}  # fmt: skip

#: In these the session must not serve: somebody else may own it already.
SOURCE_FROZEN: Final = frozenset(
    {
        SourceState.SEALING,
        SourceState.REOPENING,
        SourceState.REFILLING,
        SourceState.COMMITTING,
        SourceState.READING,
        SourceState.RAISING,
    }
)
SOURCE_ENDED: Final = frozenset(
    {SourceState.KEPT, SourceState.RESUMED, SourceState.RELEASED, SourceState.COPIED}
)
TARGET_ENDED: Final = frozenset({TargetState.COMMITTED, TargetState.ABORTED})


class Machine(Generic[_S, _E, _F]):
    """One walk through a table."""

    def __init__(self, table: Mapping[tuple[_S, _E], Step[_S, _F]], state: _S) -> None:
        self._table = table
        self.state = state

    def permits(self, event: _E) -> bool:
        """Whether ``event`` is in the table for the present state."""
        return (self.state, event) in self._table

    def on(self, event: _E) -> _F:
        """Go to the next state and return the effect to perform.

        Raises:
            TransferStateError: The pair is not in the table; the state is as before.
        """
        step = self._table.get((self.state, event))
        if step is None:
            raise TransferStateError(f"{event.value}: refused in state {self.state.value}")
        self.state = step.state
        return step.effect
