"""A socket with one deadline for everything, which reads exact lengths and nothing beyond a cap."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final

from node.config import Address
from node.errors import ListenError, PairError
from node.pair.agreement import Box

#: The largest sealed message: two certificates, a request and a key file are some 4 KiB.
MESSAGE_BYTES_MAX: Final = 32 << 10

#: Messages that may come while a person thinks: yes, and then a change of mind.
EARLY_MAX: Final = 2

_LENGTH: Final = struct.Struct("<I")


class Deadline:
    """The moment at which the whole pairing is over, however far it came."""

    def __init__(self, seconds: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock_s = clock_s
        self._end_s = clock_s() + seconds

    def left_s(self) -> float:
        """Seconds that are left, more than 0.

        Raises:
            PairError: None are.
        """
        left = self._end_s - self._clock_s()
        if left <= 0:
            raise PairError(f"not paired within {self._seconds:g} s; nothing was kept")
        return left


class Line:
    """A connection to the one other side."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._socket = connection
        self.deadline = deadline

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def send(self, content: bytes) -> None:
        """Send all of ``content``.

        Raises:
            PairError: The other side hung up, or the time is over.
        """
        with self._translated():
            self._socket.settimeout(self.deadline.left_s())
            self._socket.sendall(content)

    def receive(self, length: int) -> bytes:
        """Receive exactly ``length`` bytes.

        Raises:
            PairError: The other side hung up, or the time is over.
        """
        received = bytearray()
        while len(received) < length:
            with self._translated():
                self._socket.settimeout(self.deadline.left_s())
                part = self._socket.recv(length - len(received))
            if not part:
                raise PairError("the other side hung up; nothing was kept")
            received += part
        return bytes(received)

    def hung_up(self) -> bool:
        """Whether the other side is gone; asked when the socket is readable, takes nothing."""
        try:
            self._socket.settimeout(0)
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            self.deadline.left_s()
            raise PairError("the other side did not answer in time; nothing was kept") from None
        except OSError as error:
            why = error.strerror or "connection lost"
            raise PairError(f"the other side is gone ({why}); nothing was kept") from error


class SealedLine:
    """Sealed messages in both directions: length (4 bytes, little-endian), then the message."""

    def __init__(self, line: Line, outgoing: Box, incoming: Box) -> None:
        self.line = line
        self._outgoing = outgoing
        self._incoming = incoming
        self._early: list[bytes] = []

    def send(self, content: bytes) -> None:
        """Seal and send one message."""
        sealed = self._outgoing.seal(content)
        self.line.send(_LENGTH.pack(len(sealed)) + sealed)

    def receive(self) -> bytes:
        """Receive and open the next message.

        Raises:
            PairError: Too long, hung up, over time, or (as PairRefusedError) changed on the way.
        """
        return self._early.pop(0) if self._early else self._receive()

    def receive_early(self) -> bytes:
        """A message that came before its turn; :meth:`receive` gives it again.

        Raises:
            PairError: As for :meth:`receive`, or more came than ever do.
        """
        if len(self._early) == EARLY_MAX or self.line.hung_up():
            raise PairError("the other side hung up; nothing was kept")
        self._early.append(self._receive())
        return self._early[-1]

    def _receive(self) -> bytes:
        (length,) = _LENGTH.unpack(self.line.receive(_LENGTH.size))
        if length > MESSAGE_BYTES_MAX:
            raise PairError(f"message: expected at most {MESSAGE_BYTES_MAX} bytes, found {length}")
        return self._incoming.open(self.line.receive(length))


def listen(address: Address) -> socket.socket:
    """A socket that waits for one other side.

    Raises:
        ListenError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address.host, address.port))
        server.listen(1)
    except OSError as error:
        server.close()
        raise ListenError(f"{address}: cannot listen there ({error.strerror})") from error
    return server


def accept_one(server: socket.socket, deadline: Deadline) -> Line:
    """The first to connect; nobody else is heard afterwards.

    Raises:
        PairError: Nobody came in time.
    """
    try:
        with server:
            server.settimeout(deadline.left_s())
            connection, _ = server.accept()
    except TimeoutError:
        raise PairError("nobody joined in time; nothing was kept") from None
    return Line(connection, deadline)


def connect(address: Address, deadline: Deadline) -> Line:
    """A connection to the listener.

    Raises:
        PairError: It cannot be reached.
    """
    try:
        connection = socket.create_connection(
            (address.host, address.port), timeout=deadline.left_s()
        )
    except OSError as error:
        raise PairError(f"{address}: cannot be reached ({error.strerror or error})") from error
    return Line(connection, deadline)
