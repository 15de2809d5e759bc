"""What a node remembers of its clients: responses, conversations, answers, transcripts.

One SQLite file of mode 0600. It is the only place on disk where text of users lies in the clear.
"""

from node.records.errors import (
    BusyError,
    ConflictError,
    RecordMissingError,
    RecordsError,
    RecordsFullError,
)
from node.records.records import Records, Turn
from node.records.values import (
    Answer,
    Bounds,
    Context,
    ConversationRecord,
    ResponseRecord,
)

__all__ = [
    "Answer",
    "Bounds",
    "BusyError",
    "ConflictError",
    "Context",
    "ConversationRecord",
    "RecordMissingError",
    "Records",
    "RecordsError",
    "RecordsFullError",
    "ResponseRecord",
    "Turn",
]
