"""A filter between gRPC's own log and standard error: run as a process of its own.

gRPC ends a bad TLS handshake by itself and tells nobody why but its log, which it writes to the
file descriptor of standard error. This process reads that descriptor's lines: a failed handshake
becomes one line in the node's words, other lines of gRPC are dropped, and whatever else writes
there (a crash in native code) passes as it is. It is no thread of the node so that the last words
of a process that dies still get through. Imports nothing of ours: it starts in 20 ms.
"""

from __future__ import annotations

import re
import sys
import time
from typing import BinaryIO, Final

#: Longer lines are passed in pieces.
LINE_BYTES_MAX: Final = 4096

#: Reasons that are written in one second; more of them are counted.
LINES_PER_SECOND: Final = 20

#: How gRPC begins each line: severity and date, time, thread, place.
_GRPC: Final = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.-]+:\d+\] ")
_FAILED: Final = b"Handshake failed with error "

#: Words of BoringSSL -> what they mean here. The first that occurs counts.
_REASONS: Final = (
    (b"PEER_DID_NOT_RETURN_A_CERTIFICATE", "no certificate"),
    (b"certificate has expired", "its certificate has expired"),
    (b"certificate is not yet valid", "its certificate is not valid yet"),
    (b"Hostname Verification Check failed", "its certificate is for another name"),
    (
        b"unable to get local issuer",
        "its certificate is of another authority or not the pinned one",
    ),
    (b"certificate signature failure", "its certificate is of another authority"),
    (b"self signed certificate", "its certificate is of no authority"),
    (b"self-signed certificate", "its certificate is of no authority"),
    (b"NO_SHARED_CIPHER", "TLS below 1.3"),
    (b"UNSUPPORTED_PROTOCOL", "TLS below 1.3"),
    (b"HTTP_REQUEST", "plain text"),
    (b"WRONG_VERSION_NUMBER", "no TLS"),
    (b"BAD_PACKET_LENGTH", "it broke off, as one does that refuses this node's certificate"),
    (b"ALERT", "it refused this node's certificate"),
)


def translate(line: bytes) -> str | None:
    """What a line of gRPC says in the node's words.

    Returns:
        The reason of a failed handshake, or ``None`` where there is nothing to say.
    """
    _, failed, words = line.partition(_FAILED)
    if not failed:
        return None
    for mark, reason in _REASONS:
        if mark in words:
            return reason
    # Never what a stranger could have chosen: only the words of the library.
    known = re.search(rb"OPENSSL_internal:([A-Z0-9_]{1,64})", words)
    return known[1].decode().lower().replace("_", " ") if known else "unknown reason"


def is_grpc(line: bytes) -> bool:
    """Whether gRPC wrote the line."""
    return _GRPC.match(line) is not None


class Filter:
    """Reads lines, writes what is to be seen.

    Args:
        sink: Standard error.
    """

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._second = 0
        self._written = 0
        self._more = 0

    def take(self, line: bytes, now_s: float) -> None:
        """One line (with its end) that was written at ``now_s`` (seconds since 1970)."""
        if not is_grpc(line):
            self._sink.write(line)
        else:
            reason = translate(line)
            if reason is not None:
                self._say(f"refused in the handshake: {reason}", now_s)
        self._sink.flush()

    def _say(self, text: str, now_s: float) -> None:
        if int(now_s) != self._second:
            if self._more:
                self._write(f"refused in the handshake: {self._more} more", now_s)
            self._second, self._written, self._more = int(now_s), 0, 0
        if self._written == LINES_PER_SECOND:
            self._more += 1
            return
        self._written += 1
        self._write(text, now_s)

    def _write(self, text: str, now_s: float) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s))
        line = f"{moment},{int(now_s * 1000) % 1000:03d} WARNING node.handshakes: {text}\n"
        self._sink.write(line.encode())


def main() -> None:
    """Filter standard input to standard error until it ends."""
    one = Filter(sys.stderr.buffer)
    while line := sys.stdin.buffer.readline(LINE_BYTES_MAX):
        one.take(line, time.time())


if __name__ == "__main__":
    main()
