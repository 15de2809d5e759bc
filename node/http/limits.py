"""Bounds of the web door. Each has a reason; each is refused with a word of its own."""

from __future__ import annotations

from typing import Final

#: Requests that are under way at once, streams included: 64 that wait for a slot, those that are
#: answered, and as many again that only look.
IN_FLIGHT_MAX: Final = 256

#: Open connections, idle ones included.
CONNECTIONS_MAX: Final = 512

#: Bytes of a request line and its headers.
HEAD_BYTES_MAX: Final = 32 << 10

#: How long a new connection may take to send them, in seconds; also how long it may be idle.
HEAD_S: Final = 15.0

#: What was written and is not acknowledged for so long was written to nobody.
UNACKNOWLEDGED_MS: Final = 30_000

#: Bytes that the system takes for a reader that is behind. Its own choice grows to megabytes, and
#: a reader that does not read would be noticed only after thousands of tokens.
SEND_BUFFER_BYTES: Final = 128 << 10

#: How long one write may wait for a reader that does not read.
WRITE_S: Final = 20.0

#: Connections that the system keeps waiting to be accepted.
BACKLOG: Final = 128
