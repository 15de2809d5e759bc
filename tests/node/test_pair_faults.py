"""Pairing with somebody in between, with garbage, and with ends that break off anywhere."""

from __future__ import annotations

import socket

import pytest
from pair_support import HOST, Scripted, Side, as_node, files_of, open_port

from kvpack.keys import generate_key, write_key_file
from node import enroll
from node.credentials import load_credentials
from node.errors import PairError, PairRefusedError
from node.pair import agreement as agree
from node.pair import talk
from node.pair.agreement import FIRST_BYTES, MAGIC, SECOND_BYTES, THIRD_BYTES
from node.pair.line import Deadline
from node.pair.messages import Grant, Kind, decode_grant, encode_grant, encode_word, expect_word
from node.pair.party import settle


@pytest.fixture
def wishes(tmp_path):
    """Listener ``a`` with an authority that is still to be made, and joiner ``b``."""
    authority = tmp_path / "authority"
    return as_node(tmp_path / "a", "a", authority=authority), as_node(tmp_path / "b", "b")


def nothing_is_there(tmp_path):
    return files_of(tmp_path) == []


def test_a_man_in_the_middle_shows_as_two_different_codes(tmp_path, wishes):
    """It speaks for each side to the other, with keys and names of its own making."""
    port, address = open_port()
    one, two = Side.listen(wishes[0]), Side.join(wishes[1], address)
    to_joiner = Scripted.accept(port)
    to_listener = Scripted.join(one.address)
    to_listener.offers(as_node(tmp_path / "mallory-b", "b"))
    to_joiner.offers(as_node(tmp_path / "mallory-a", "a", authority=tmp_path / "mallory-root"))
    codes = one.code(), two.code()
    assert codes == (to_listener.agreed.code, to_joiner.agreed.code) and codes[0] != codes[1]
    one.type("no\n")
    two.type("no\n")
    assert "not confirmed" in one.end() and "not confirmed" in two.end()
    assert nothing_is_there(tmp_path)


def test_a_man_in_the_middle_cannot_pass_on_what_the_sides_say(tmp_path, wishes):
    """A proof is over its own agreement: relayed offers are refused before a code is shown."""
    port, address = open_port()
    one, two = Side.listen(wishes[0]), Side.join(wishes[1], address)
    to_joiner, to_listener = Scripted.accept(port), Scripted.join(one.address)
    to_listener.sealed.send(to_joiner.sealed.receive())
    assert "does not hold the key it speaks for" in one.end()
    to_joiner.hang_up()
    assert "hung up" in two.end()
    assert isinstance(one.error, PairRefusedError) and nothing_is_there(tmp_path)


@pytest.mark.parametrize("place", [3, 20, 70, 110, 130, None])
def test_bytes_that_are_only_carried_pair_well_and_changed_ones_never(tmp_path, wishes, place):
    """A flipped bit anywhere in the agreement ends it before anybody is asked."""
    one = Side.listen(wishes[0])
    port, address = open_port()
    two = Side.join(wishes[1], address)
    joiner, _ = port.accept()
    with port, joiner, socket.create_connection((HOST, one.address.port)) as listener:
        ways = ((joiner, listener, FIRST_BYTES), (listener, joiner, SECOND_BYTES))
        passed = 0
        for source, target, length in (*ways, (joiner, listener, THIRD_BYTES)):
            message = bytearray(source.recv(length, socket.MSG_WAITALL))
            if place is not None and passed <= place < passed + len(message):
                message[place - passed] ^= 1
            passed += length
            target.sendall(message)
            if len(message) < length:
                # Refused already: carry that on, too.
                break
        else:
            listener.sendall(joiner.recv(1 << 15))
        if place is None:
            joiner.sendall(listener.recv(1 << 15))
            assert one.code() == two.code()
            one.type("no\n")
    assert one.end() and two.end() and one.error and two.error
    assert (len(one.lines) > 1) == (place is None) and nothing_is_there(tmp_path)


def test_a_key_that_is_not_the_one_committed_to_is_refused(wishes):
    one = Side.listen(wishes[0])
    with socket.create_connection((HOST, one.address.port)) as raw:
        raw.sendall(agree.first_message(agree.Share.draw()))
        raw.recv(SECOND_BYTES, socket.MSG_WAITALL)
        raw.sendall(agree.third_message(agree.Share.draw()))
        assert "changed its key" in one.end()
    assert isinstance(one.error, PairRefusedError)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(64),
    "tls": bytes.fromhex("16030100c8010000c4") + bytes(200),
    "zeros": bytes(4096),
    "other version": b"kvpack-pair-v2\0\0" + bytes(32),
    "pickle": b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR." * 8,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_ends_either_side_with_one_error_and_leaves_nothing(tmp_path, wishes, kind):
    one = Side.listen(wishes[0])
    with socket.create_connection((HOST, one.address.port)) as raw:
        raw.sendall(GARBAGE[kind])
        assert "does not speak kvnode pair" in one.end()
    port, address = open_port()
    two = Side.join(wishes[1], address)
    with port:
        raw, _ = port.accept()
        with raw:
            raw.sendall(GARBAGE[kind] + bytes(SECOND_BYTES))
            assert "does not speak kvnode pair" in two.end()
    assert nothing_is_there(tmp_path)


@pytest.mark.parametrize("sent", [b"", MAGIC[:5], MAGIC + bytes(31), MAGIC + bytes(32)])
def test_a_side_that_hangs_up_early_leaves_nothing(tmp_path, wishes, sent):
    one = Side.listen(wishes[0])
    with socket.create_connection((HOST, one.address.port)) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        assert "hung up" in one.end()
    assert nothing_is_there(tmp_path)


def test_a_length_beyond_the_cap_takes_no_memory(wishes):
    one = Side.listen(wishes[0])
    other = Scripted.join(one.address)
    other.sealed.line.send((2**31).to_bytes(4, "little"))
    assert "at most 32768 bytes, found 2147483648" in one.end()


@pytest.mark.parametrize(
    "message",
    [b"", b"\x63", bytes((Kind.OFFER,)), encode_word(Kind.YES), bytes((Kind.OFFER,)) + bytes(17)],
)
def test_messages_out_of_place_are_refused(wishes, message):
    one = Side.listen(wishes[0])
    other = Scripted.join(one.address)
    other.sealed.send(message)
    said = one.end()
    assert "message: expected OFFER" in said or "OFFER: its fields" in said
    with pytest.raises(PairError, match="the other side stopped"):
        expect_word(other.sealed.receive(), Kind.YES)


def test_a_side_that_hangs_up_while_the_other_thinks_is_noticed_at_once(tmp_path, wishes):
    one = Side.listen(wishes[0])
    other = Scripted.join(one.address)
    other.offers(wishes[1])
    one.code()
    # Its yes came before ours: then, too.
    other.sealed.send(encode_word(Kind.YES))
    other.hang_up()
    assert "hung up" in one.end() and nothing_is_there(tmp_path)


def test_nobody_waits_for_a_silent_side_beyond_the_deadline(tmp_path, wishes):
    assert "nobody joined in time" in Side.listen(wishes[0], seconds=0.1).end()
    one = Side.listen(wishes[0], seconds=0.5)
    with socket.create_connection((HOST, one.address.port)):
        said = one.end()
    # The second, should this thread have slept through its whole time.
    assert "not paired within 0.5 s" in said or "nobody joined in time" in said
    assert nothing_is_there(tmp_path)


def test_nobody_waits_for_a_person_beyond_the_deadline(tmp_path, wishes, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(talk, "Deadline", lambda seconds: Deadline(seconds, lambda: now_s[0]))
    one = Side.listen(wishes[0])
    other = Scripted.join(one.address)
    other.offers(wishes[1])
    one.code()
    now_s[0] = 61.0
    # Half an answer is none, and wakes the side up to look at its clock.
    one.type("ye")
    assert "not paired within 60 s" in one.end() and nothing_is_there(tmp_path)


def test_only_the_first_to_connect_is_heard(wishes):
    one = Side.listen(wishes[0])
    first = Scripted.join(one.address)
    with pytest.raises(PairError, match=r"cannot be reached|is gone|hung up"):
        Scripted.join(one.address).sealed.receive()
    first.hang_up()
    assert "hung up" in one.end()


def scripted_listener(wish, joining):
    """A listener up to both yeses: ``(side of the joiner, scripted end, deal)``."""
    port, address = open_port()
    two = Side.join(joining, address)
    other = Scripted.accept(port)
    party, theirs = other.offers(wish)
    deal = settle(party, theirs, other.agreed, joiner=False)
    two.code()
    two.type("yes\n")
    expect_word(other.sealed.receive(), Kind.YES)
    other.sealed.send(encode_word(Kind.YES))
    return two, other, deal


@pytest.mark.parametrize("end", ["no grant", "no done"])
def test_a_joiner_that_does_not_hear_the_listener_to_the_end_keeps_nothing(tmp_path, wishes, end):
    two, other, deal = scripted_listener(*wishes)
    if end == "no done":
        other.sealed.send(encode_grant(deal.grant()))
        assert decode_grant(other.sealed.receive()) == Grant(b"", b"")
        expect_word(other.sealed.receive(), Kind.DONE)
        # It has written by now, and takes it back.
        assert (tmp_path / "b" / "nodes" / "a.pem").exists()
    other.hang_up()
    said = two.end()
    assert "hung up" in said or "is gone" in said
    assert nothing_is_there(tmp_path), files_of(tmp_path)


def scripted_joiner(wish, listening):
    """A joiner up to its own grant: ``(side of the listener, scripted end)``."""
    one = Side.listen(listening)
    other = Scripted.join(one.address)
    one.type("yes\n")
    party, theirs = other.offers(wish)
    settle(party, theirs, other.agreed, joiner=True)
    other.sealed.send(encode_word(Kind.YES))
    expect_word(other.sealed.receive(), Kind.YES)
    decode_grant(other.sealed.receive())
    other.sealed.send(encode_grant(Grant(b"", b"")))
    return one, other


def test_a_listener_keeps_nothing_before_the_joiner_has_written(tmp_path, wishes):
    one, other = scripted_joiner(wishes[1], wishes[0])
    other.hang_up()
    said = one.end()
    assert "hung up" in said or "is gone" in said
    assert nothing_is_there(tmp_path)


def test_a_listener_says_so_when_the_very_last_word_is_missing(tmp_path, wishes):
    one, other = scripted_joiner(wishes[1], wishes[0])
    other.sealed.send(encode_word(Kind.DONE))
    expect_word(other.sealed.receive(), Kind.DONE)
    other.hang_up()
    assert one.end() == "b" and one.paired.heard is False
    assert load_credentials(tmp_path / "a").peer("b")


@pytest.mark.parametrize("tenant", ["other", None])
def test_a_key_that_is_not_the_announced_one_is_taken_back(tmp_path, wishes, tenant):
    enroll.enroll(tmp_path / "authority", tmp_path / "a", "a")
    write_key_file(tmp_path / "a" / "tenant.key", generate_key("acme"))
    content = b"no key"
    if tenant is not None:
        write_key_file(tmp_path / "other.key", generate_key(tenant))
        content = (tmp_path / "other.key").read_bytes()
    giving = as_node(tmp_path / "a", None, authority=tmp_path / "authority", gives_key=True)
    two, other, deal = scripted_listener(giving, wishes[1])
    other.sealed.send(encode_grant(Grant(deal.grant().certificate_pem, content)))
    said = two.end()
    assert "than announced" in said or "not a kvpack-key-v1" in said
    assert not (tmp_path / "b").exists()


def test_a_grant_that_was_not_agreed_on_is_refused(tmp_path, wishes):
    strange = as_node(tmp_path / "a", "a", authority=tmp_path / "authority")
    for change in ("key", "nothing", "foreign"):
        two, other, deal = scripted_listener(strange, wishes[1])
        leaf = {"key": deal.peer_pem, "nothing": b"", "foreign": deal.party.certificate_pem}[change]
        other.sealed.send(encode_grant(Grant(leaf, b"key" if change == "key" else b"")))
        assert "not what was agreed" in (said := two.end()) or "not for this side's key" in said
        assert nothing_is_there(tmp_path)
