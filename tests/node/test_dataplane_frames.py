"""What is refused before a stream: bytes, tickets and options of plain data planes."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from node.cli import main
from node.config import Address
from node.credentials import Role
from node.dataplane import frames, tickets
from node.dataplane.frames import DisturbedError, Hello, Tags, decode_hello, read_frame_header
from node.dataplane.options import Plane, PlaneAddress, PlaneOptions, parse_towards
from node.dataplane.tickets import Tickets
from node.errors import UsageError
from node.migration.journal import TransferKey
from node.migration.wire import PIECE_BYTES_MAX

KEY = b"k" * 32
TRANSFER = TransferKey(1, "source", 1)


def test_a_hello_is_48_bytes_and_nothing_else():
    hello = Hello(7, b"t" * 32).encode()
    assert len(hello) == 48 and hello.startswith(b"kvplane1")
    found = decode_hello(hello)
    assert (found.number, found.token) == (7, b"t" * 32)
    for other in (b"", hello[:-1], hello + b"x", b"kvplane2" + hello[8:]):
        assert decode_hello(other) is None
    assert b"t" * 32 not in repr(found).encode()


def test_a_tag_holds_place_length_and_head_of_a_piece():
    pieces = [bytes([number]) * 5000 for number in range(3)]
    source = Tags(KEY)
    tags = [source.next(piece) for piece in pieces]
    target = Tags(KEY)
    for tag, piece in zip(tags, pieces, strict=True):
        target.require(tag, memoryview(piece))
    target.require_taken(source.taken())
    for wrong in (
        (tags[1], pieces[1]),  # another place
        (tags[0], pieces[0][:-1]),  # another length
        (tags[0], b"\1" + pieces[0][1:]),  # another head
        (bytes(16), pieces[0]),
        (Tags(b"x" * 32).next(pieces[0]), pieces[0]),  # another key
    ):
        with pytest.raises(DisturbedError):
            Tags(KEY).require(*wrong)


def test_every_changed_bit_of_an_acknowledgement_is_seen():
    source, target = Tags(KEY), Tags(KEY)
    source.next(b""), target.next(b"")
    good = target.taken()
    source.require_taken(good)
    for bit in range(8 * len(good)):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DisturbedError):
            source.require_taken(bytes(changed))


@pytest.mark.parametrize("length", [PIECE_BYTES_MAX + 1, 2**31, 2**32 - 1])
def test_no_length_beyond_a_piece_is_believed(length):
    header = length.to_bytes(4, "big") + bytes(frames.TAG_BYTES)
    with pytest.raises(DisturbedError, match=str(length)):
        read_frame_header(header)


@pytest.fixture
def peer(world):
    """A pinned peer."""
    from node.trust import load_credentials

    return load_credentials(world.credentials("target")).peer("source", Role.NODE)


def shown(ticket, token=None) -> Hello:
    return Hello(ticket.number, ticket.token if token is None else token)


def test_a_ticket_opens_one_stream_of_its_plane_in_its_time(peer):
    now = [100.0]
    gate = Tickets(lambda: now[0])
    ticket = gate.issue(Plane.SOCKET, TRANSFER, peer)
    assert gate.redeem(Plane.SOCKET, None) is None
    assert gate.redeem(Plane.SOCKET, Hello(ticket.number ^ 1, ticket.token)) is None
    # A wrong token uses nothing up.
    assert gate.redeem(Plane.SOCKET, shown(ticket, bytes(32))) is None
    assert gate.redeem(Plane.GRPC_PLAIN, shown(ticket)) is None
    assert gate.redeem(Plane.SOCKET, shown(ticket)) is ticket
    assert gate.redeem(Plane.SOCKET, shown(ticket)) is None, "used"
    late = gate.issue(Plane.SOCKET, TRANSFER, peer)
    now[0] += tickets.TICKET_S
    assert gate.redeem(Plane.SOCKET, shown(late)) is None
    older = gate.issue(Plane.SOCKET, TRANSFER, peer)
    newer = gate.issue(Plane.SOCKET, TRANSFER, peer)
    assert gate.redeem(Plane.SOCKET, shown(older)) is None, "the transfer was prepared again"
    assert gate.redeem(Plane.SOCKET, shown(newer)) is newer
    assert newer.token != older.token and newer.frame_key != older.frame_key
    for secret in (newer.token, newer.frame_key):
        assert secret.hex() not in repr(newer) and repr(secret) not in repr(newer)


def test_tickets_that_nobody_uses_take_no_memory_for_ever(peer):
    gate = Tickets(lambda: 0.0)
    for number in range(1, 200):
        gate.issue(Plane.SOCKET, TransferKey(1, "source", number), peer)
    assert len(gate) <= tickets.TICKETS_MAX


def at(host: str) -> tuple[PlaneAddress, ...]:
    return (PlaneAddress(Plane.SOCKET, Address(host, 7412)),)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - refused
def test_a_listener_that_no_address_leads_to_is_refused(host):
    with pytest.raises(UsageError, match="connect to"):
        PlaneOptions(at(host), frozenset({"a"}), without_tls=True)


@pytest.mark.parametrize("host", ["192.0.2.7", "box.example"])
def test_a_listener_that_other_machines_reach_needs_a_word_of_its_own(host):
    with pytest.raises(UsageError, match="--data-plane-without-tls"):
        PlaneOptions(at(host), frozenset({"a"}))
    assert PlaneOptions(at(host), frozenset({"a"}), without_tls=True).listens == at(host)


def test_options_that_do_not_go_together_are_refused():
    for listens, senders in ((at("127.0.0.1"), ()), ((), ("a",)), (at("::1") * 2, ("a",))):
        with pytest.raises(UsageError, match="--data-plane"):
            PlaneOptions(listens, frozenset(senders))
    for text in ("socket", "mtls=127.0.0.1:1", "socket=127.0.0.1", "rdma=127.0.0.1:1", ""):
        with pytest.raises(UsageError):
            PlaneAddress.parse(text)
    for texts in (["a"], ["a=rdma"], ["=socket"], ["a=socket", "a=mtls"]):
        with pytest.raises(UsageError, match="--data-plane-to"):
            parse_towards(texts)
    assert parse_towards(["a=socket", "b=mtls"]) == {"a": Plane.SOCKET, "b": Plane.MTLS}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--data-plane", "socket=127.0.0.1:0"],
        ["--data-plane", "socket=192.0.2.7:7412", "--data-plane-from", "source"],
        ["--data-plane-from", "source"],
    ],
)
def test_a_node_does_not_start_with_a_plane_that_is_not_meant(tmp_path, wrong):
    needed = ["--grpc", "127.0.0.1:0", "--data-dir", str(tmp_path / "d")]
    needed += ["--credentials", str(tmp_path / "c"), "--directory", "sqlite:x"]
    ran = CliRunner().invoke(main, ["serve", *needed, *wrong])
    assert ran.exit_code == 2 and "--data-plane" in ran.output
    assert not (tmp_path / "d").exists()
