"""What can go wrong with records. No message holds text or keys of a client."""

from __future__ import annotations

from node.errors import NodeBusyError, NodeError


class RecordsError(NodeError):
    """The database of records could not be read or written; nothing was changed."""

    reason = "records_unavailable"


class RecordMissingError(NodeError):
    """No such response, conversation or item of this tenant: never there, deleted or collected."""

    reason = "record_not_found"


class RecordsFullError(NodeBusyError):
    """A tenant has as many conversations, or as many bytes of one, as it may have."""

    reason = "records_full"


class ConflictError(NodeError):
    """The request assumes what is not so: another revision, or a key used for something else."""

    reason = "conflict"


class BusyError(NodeError):
    """Somebody else is at it: the conversation is being written, the key's request still runs."""

    reason = "busy_elsewhere"
