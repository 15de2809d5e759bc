"""A request and the start of an answer as messages and back. Bounds are checked here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from kvpack import limits
from kvpack.errors import FormatError, LimitError
from node.pb.v1 import relay_pb2 as pb

SERVICE: Final = "node.v1.Relay"

#: Bytes of a body in one message.
PIECE_BYTES_MAX: Final = 1 << 20

#: As over HTTP (:mod:`node.http.body`, :mod:`node.http.limits`).
BODY_BYTES_MAX: Final = 8 << 20
HEAD_BYTES_MAX: Final = 32 << 10

METHODS: Final = frozenset({"GET", "POST", "DELETE"})

#: What a request says beside its body that changes the answer. No key, no cookie, no origin: who
#: calls was asked by the node that it called.
REQUEST_HEADERS: Final = frozenset({b"content-type", b"accept", b"idempotency-key"})

#: What each answer gets from the node that the client called, and what is of one connection.
_NOT_PASSED: Final = frozenset(
    {
        b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"trailer",
        b"x-request-id", b"x-content-type-options",
    }
)  # fmt: skip

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, repr=False)
class Passed:
    """One request on its way to the owner.

    Attributes:
        method: HTTP's.
        raw_path: As it came.
        query: What follows the question mark.
        headers: Lower-case names; only those of :data:`REQUEST_HEADERS`.
        tenant: Whose key the caller showed.
        body: Whole.

    Raises:
        FormatError: Another method, a path that is none, a header that is not passed on.
        LimitError: Longer than a request may be.
    """

    method: str
    raw_path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    tenant: str
    body: bytes

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise FormatError("relay.method", "GET, POST or DELETE", f"{len(self.method)} letters")
        if not self.raw_path.startswith(b"/") or not self.raw_path.isascii():
            raise FormatError("relay.raw_path", "an absolute path in ASCII", "another")
        if any(name not in REQUEST_HEADERS for name, _ in self.headers):
            raise FormatError("relay.headers", "those that are passed on", "another one")
        size = len(self.raw_path) + len(self.query) + sum(len(v) for _, v in self.headers)
        limits.check_range("relay.head", size, 1, HEAD_BYTES_MAX, "bytes")
        limits.check_range("relay.body", len(self.body), 0, BODY_BYTES_MAX, "bytes")

    @property
    def path(self) -> str:
        """As routes read it."""
        return unquote(self.raw_path.decode("ascii"))

    def pieces(self) -> Iterator[pb.RelayPiece]:
        """As messages."""
        head = pb.RelayHead(
            method=self.method, raw_path=self.raw_path, query=self.query,
            headers=header_messages(self.headers), tenant=self.tenant,
        )  # fmt: skip
        yield pb.RelayPiece(head=head)
        for part in split(self.body):
            yield pb.RelayPiece(body=part)


async def read_passed(pieces: AsyncIterator[pb.RelayPiece]) -> Passed:
    """The request that ``pieces`` carry.

    Raises:
        FormatError: A piece out of order, or what :class:`Passed` refuses.
        LimitError: Too long; raised before more of it is kept.
    """
    head: pb.RelayHead | None = None
    body = bytearray()
    async for piece in pieces:
        which = piece.WhichOneof("piece")
        if (which == "head") != (head is None):
            raise FormatError("relay.piece", "one head, then the body", str(which))
        if which == "head":
            head = piece.head
            continue
        body += piece.body
        if len(body) > BODY_BYTES_MAX:
            raise LimitError("relay.body", f"at most {BODY_BYTES_MAX} bytes", len(body))
    if head is None:
        raise FormatError("relay.piece", "a head", "nothing")
    headers = tuple((one.name, one.value) for one in head.headers)
    return Passed(head.method, head.raw_path, head.query, headers, head.tenant, bytes(body))


def answer_start(status: int, headers: Iterable[tuple[bytes, bytes]]) -> pb.RelayPart:
    """The first part of an answer."""
    kept = [(n.lower(), v) for n, v in headers if n.lower() not in _NOT_PASSED]
    return pb.RelayPart(start=pb.RelayStart(status=status, headers=header_messages(kept)))


def header_messages(headers: Iterable[tuple[bytes, bytes]]) -> list[pb.RelayHeader]:
    """``headers`` as messages."""
    return [pb.RelayHeader(name=name, value=value) for name, value in headers]


def header_values(messages: Iterable[pb.RelayHeader]) -> Headers:
    """What ``messages`` stand for, without what no owner may say of this node's connection."""
    return [(one.name, one.value) for one in messages if one.name not in _NOT_PASSED]


def split(body: bytes) -> Iterator[bytes]:
    """``body`` in pieces that a message takes."""
    for first in range(0, len(body), PIECE_BYTES_MAX):
        yield body[first : first + PIECE_BYTES_MAX]
