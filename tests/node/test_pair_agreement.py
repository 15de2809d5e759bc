"""The arithmetic of a pairing, against a second reading of its spec and against fixed values."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from node.credentials import Role
from node.errors import PairError, PairRefusedError
from node.pair import agreement as agree
from node.pair import messages
from node.pair.agreement import Box, Share
from node.pair.agreement import agree as derive
from node.pair.messages import Grant, Kind, Offer, TenantName


def share(seed: int) -> Share:
    """A share whose every byte is fixed. Never outside a test."""
    return Share(bytes([seed]) * 32, X25519PrivateKey.from_private_bytes(bytes([seed + 1]) * 32))


def three(joiner: Share, listener: Share):
    return (
        agree.first_message(joiner),
        agree.second_message(listener),
        agree.third_message(joiner),
    )


def test_both_sides_hold_the_same_and_it_is_what_the_spec_says():
    joiner, listener = share(1), share(3)
    said = three(joiner, listener)
    at_joiner = derive(joiner, *said, joiner=True)
    assert at_joiner == derive(listener, *said, joiner=False)
    # docs/spec/pair-v1.md section 3, by hand.
    magic = b"kvpack-pair-v1" + bytes(2)
    opened = joiner.key.public_key().public_bytes_raw() + bytes([1]) * 32
    first = magic + hashlib.sha256(b"kvpack/pair/v1/commit\0" + opened).digest()
    second = magic + listener.key.public_key().public_bytes_raw() + bytes([3]) * 32
    assert said == (first, second, opened)
    transcript = hashlib.sha256(b"kvpack/pair/v1/transcript\0" + first + second + opened).digest()
    secret = joiner.key.exchange(listener.key.public_key())
    extracted = hmac.digest(transcript, secret, "sha256")
    blocks = [b""]
    for number in (1, 2, 3):
        block = blocks[-1] + b"kvpack/pair/v1/keys" + bytes([number])
        blocks.append(hmac.digest(extracted, block, "sha256"))
    stream = b"".join(blocks)
    code = f"{int.from_bytes(stream[64:72], 'little') % 1_000_000:06d}"
    assert at_joiner.transcript == transcript
    assert (at_joiner.to_listener, at_joiner.to_joiner) == (stream[:32], stream[32:64])
    assert at_joiner.code == f"{code[:3]} {code[3:]}"
    assert at_joiner.proof_input(joiner=True) == b"kvpack/pair/v1/proof\0joiner\0" + transcript
    assert at_joiner.proof_input(joiner=False) == b"kvpack/pair/v1/proof\0listener\0" + transcript
    assert (at_joiner.code, transcript.hex()[:16]) == ("677 685", "7ae97957f394af00")


def test_no_secret_shows_in_a_repr():
    one = share(1)
    agreed = derive(one, *three(one, share(3)), joiner=True)
    for secret in (agreed.to_joiner, agreed.to_listener):
        assert repr(secret) not in repr(agreed)
    assert "X25519" not in repr(one)
    assert "secret" not in repr(Grant(b"", b"secret"))


def test_every_byte_of_every_message_counts():
    joiner, listener = share(1), share(3)
    said = three(joiner, listener)
    good = derive(listener, *said, joiner=False).code
    for which, message in enumerate(said):
        for place in range(len(message)):
            changed = bytearray(message)
            changed[place] ^= 0x20
            parts = [*said[:which], bytes(changed), *said[which + 1 :]]
            try:
                other = derive(joiner, *parts, joiner=True)
            except PairError:
                continue
            assert other.code != good, (which, place)


def test_the_code_is_fixed_for_nobody_by_one_side_alone():
    """Each nonce of the listener moves the code over its whole range: 600 of them hardly repeat."""
    joiner = share(1)
    codes = set()
    for number in range(600):
        other = Share(number.to_bytes(32, "little"), share(3).key)
        codes.add(derive(joiner, *three(joiner, other), joiner=True).code)
    assert len(codes) >= 596
    assert {code[0] for code in codes} == set("0123456789")


def test_an_opening_that_was_not_committed_to_is_refused():
    joiner, listener = share(1), share(3)
    first, second, _ = three(joiner, listener)
    with pytest.raises(PairRefusedError, match="after it had seen ours"):
        derive(listener, first, second, agree.third_message(share(5)), joiner=False)


def test_a_key_that_gives_no_secret_is_refused():
    joiner = share(1)
    first, second, third = three(joiner, share(3))
    flat = second[:16] + bytes(32) + second[48:]
    with pytest.raises(PairRefusedError, match="no secret"):
        derive(joiner, first, flat, third, joiner=True)
    with pytest.raises(PairError, match="wrong lengths"):
        derive(joiner, first, second + b"x", third, joiner=True)


def test_sealed_messages_open_once_in_order_and_unchanged():
    key = bytes(range(32))
    sender = Box(key)
    sealed = [sender.seal(b"one"), sender.seal(b"two"), sender.seal(b"two")]
    assert sealed[1] != sealed[2]
    receiver = Box(key)
    assert receiver.open(sealed[0]) == b"one"
    for box, message in (
        (receiver, sealed[0]),
        (Box(key), sealed[1]),
        (Box(bytes(32)), sealed[0]),
    ):
        with pytest.raises(PairRefusedError):
            box.open(message)
    for place in range(len(sealed[0])):
        changed = bytearray(sealed[0])
        changed[place] ^= 1
        with pytest.raises(PairRefusedError):
            Box(key).open(bytes(changed))


OFFER = Offer("one", Role.CLIENT, b"leaf", b"", b"root", b"proof", TenantName("acme", 7))
ASKING = Offer("two", Role.NODE, b"", b"request", b"", b"proof", None)


def test_offers_and_grants_come_back():
    for offer in (OFFER, ASKING):
        assert messages.decode_offer(messages.encode_offer(offer)) == offer
    for grant in (Grant(b"", b""), Grant(b"leaf", b"key")):
        assert messages.decode_grant(messages.encode_grant(grant)) == grant


def test_every_cut_and_every_added_byte_of_a_message_is_refused():
    whole = messages.encode_offer(OFFER)
    for length in range(len(whole)):
        with pytest.raises(PairError):
            messages.decode_offer(whole[:length])
    with pytest.raises(PairError):
        messages.decode_offer(whole + b"\0")
    with pytest.raises(PairError):
        messages.expect_word(bytes((Kind.YES, 0)), Kind.YES)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_error(content):
    for read in (messages.decode_offer, messages.decode_grant):
        for start in (b"", bytes((Kind.OFFER,)), bytes((Kind.GRANT,))):
            try:
                read(start + content)
            except PairError:
                continue


@pytest.mark.parametrize(
    "change",
    [
        {"name": b"A"},
        {"name": b"\xff"},
        {"role": b"owner"},
        {"request": b"both"},
        {"authority": b""},
        {"tenant": b""},
        {"epoch": b"\1"},
        {"tenant": b"\xff"},
    ],
)
def test_fields_that_are_not_what_they_should_be_are_named(change):
    fields = {
        "name": b"one",
        "role": b"node",
        "certificate": b"leaf",
        "request": b"",
        "authority": b"root",
        "proof": b"proof",
        "tenant": b"acme",
        "epoch": (1).to_bytes(4, "little"),
    }
    fields.update(change)
    message = bytes((Kind.OFFER,))
    for content in fields.values():
        message += len(content).to_bytes(2, "little") + content
    with pytest.raises(PairError, match="offer"):
        messages.decode_offer(message)
