"""Canonical bytes: one value has one encoding, and no other bytes are accepted for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_kit import IDENTITY, LAYOUT, NUMERICS, ROPE

from kvpack import limits, wire
from kvpack.errors import FormatError, KvpackError, LimitError
from kvpack.identity import CallRun, CallSchedule, Identity, NumericsFingerprint
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout
from kvpack.printable import is_printable
from kvpack.wire import rules
from kvpack.wire.scan import FieldRule, Kind, MessageRule, plain_pattern, scan

_PLAIN = {
    name: rule
    for name, rule in vars(rules).items()
    if isinstance(rule, MessageRule) and rule.plain is not None
}

_NAMES = st.text(min_size=1, max_size=12).filter(is_printable)
_BITS = st.integers(0, (1 << 64) - 1)
_DIGESTS = st.binary(min_size=32, max_size=32)


@st.composite
def _layers(draw: st.DrawFn) -> LayerLayout:
    key_dim = draw(st.integers(2, 64))
    rope = None
    if draw(st.booleans()):
        dims = draw(st.integers(2, key_dim))
        rope = RopeLayout(draw(_BITS), dims, draw(st.booleans()), draw(_NAMES))
    window = draw(st.none() | st.integers(1, limits.POSITION_MAX))
    kind = LayerKind.FULL if window is None else LayerKind.SWA
    value_dim = draw(st.integers(1, 64))
    return LayerLayout(kind, window, draw(st.integers(1, 8)), key_dim, value_dim, rope)


_LAYOUTS = st.builds(
    CacheLayout,
    st.lists(_layers(), min_size=1, max_size=4).map(tuple),
    st.sampled_from(Encoding),
    st.integers(1, limits.POSITION_MAX),
)
_CONSTANTS = st.dictionaries(_NAMES, _BITS, max_size=4).map(lambda d: tuple(sorted(d.items())))
_IDENTITIES = st.builds(
    Identity, _NAMES, _DIGESTS, _NAMES, _DIGESTS, _DIGESTS, _DIGESTS, _NAMES, _LAYOUTS, _CONSTANTS
)
_NUMERICS = st.builds(
    NumericsFingerprint,
    st.dictionaries(_NAMES, _NAMES, max_size=4).map(lambda d: tuple(sorted(d.items()))),
)
_RUNS = st.builds(CallRun, st.integers(1, 1 << 24), st.integers(1, 1 << 24))
_SCHEDULES = st.builds(CallSchedule, st.lists(_RUNS, max_size=6).map(tuple))


@settings(max_examples=150)
@given(_IDENTITIES)
def test_identities_and_layouts_survive_the_wire(identity: Identity) -> None:
    data = wire.encode_identity(identity)
    assert wire.decode_identity(data) == identity
    assert wire.encode_identity(wire.decode_identity(data)) == data
    assert wire.decode_layout(wire.encode_layout(identity.layout)) == identity.layout


@given(_NUMERICS, _SCHEDULES)
def test_numerics_and_schedules_survive_the_wire(
    numerics: NumericsFingerprint, schedule: CallSchedule
) -> None:
    assert wire.decode_numerics(wire.encode_numerics(numerics)) == numerics
    assert wire.decode_schedule(wire.encode_schedule(schedule)) == schedule


@settings(max_examples=100)
@given(st.binary(max_size=200), st.sampled_from(["identity", "layout", "numerics", "schedule"]))
def test_any_bytes_give_a_value_that_encodes_to_them_or_an_error_of_ours(
    data: bytes, kind: str
) -> None:
    try:
        value = getattr(wire, f"decode_{kind}")(data)
    except KvpackError:
        return
    assert getattr(wire, f"encode_{kind}")(value) == data


@settings(max_examples=150)
@given(st.data())
def test_a_changed_encoding_gives_another_value_or_an_error_of_ours(data: st.DataObject) -> None:
    good = bytearray(wire.encode_identity(IDENTITY))
    for _ in range(data.draw(st.integers(1, 3))):
        action = data.draw(st.sampled_from(["set", "insert", "delete"]))
        place = data.draw(st.integers(0, len(good) - 1))
        if action == "set":
            good[place] = data.draw(st.integers(0, 255))
        elif action == "insert":
            good[place:place] = data.draw(st.binary(min_size=1, max_size=3))
        elif len(good) > 1:
            del good[place]
    try:
        value = wire.decode_identity(bytes(good))
    except KvpackError:
        return
    assert wire.encode_identity(value) == bytes(good)


#: One layer: kind 1, window 5, heads 1, key dim 2, value dim 3.
_LAYER = bytes.fromhex("0801 1005 1801 2002 2803")
#: Encoding 1, context 16, then that layer.
_GOOD = bytes.fromhex("0801 1010 1a0a") + _LAYER


def test_the_hand_made_layout_is_good() -> None:
    layout = wire.decode_layout(_GOOD)
    assert layout == CacheLayout((LayerLayout(LayerKind.SWA, 5, 1, 2, 3),), Encoding.F16LE, 16)
    assert wire.encode_layout(layout) == _GOOD


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("out of order", "1010 0801 1a0a" + _LAYER.hex(), "out of order"),
        ("singular twice", "0801 0801 1010 1a0a" + _LAYER.hex(), "out of order"),
        ("repeated apart", "0801 1010 1a0a" + _LAYER.hex() + "1010", "out of order"),
        ("long varint value", "0881 00 1010 1a0a" + _LAYER.hex(), "minimal"),
        ("long varint tag", "8800 01 1010 1a0a" + _LAYER.hex(), "minimal"),
        ("long varint length", "0801 1010 1a8a00" + _LAYER.hex(), "minimal"),
        ("varint above 64 bits", "08ffffffffffffffffff7f", "2\\^64"),
        ("varint without end", "08ffffffffffffffffffffff01", "2\\^64"),
        ("cut in a varint", "0880", "whole varint"),
        ("wrong wire type", "0d01000000 1010 1a0a" + _LAYER.hex(), "wire type"),
        ("group", "0b0c", "wire type"),
        ("unknown field", "0801 1010 1a0a" + _LAYER.hex() + "2001", "fields 1 to 3"),
        ("unknown field inside", "0801 1010 1a0c" + _LAYER.hex() + "3801", "fields 1 to 6"),
        ("field zero", "0001", "fields 1 to 3"),
        ("zero on the wire", "0800 1010 1a0a" + _LAYER.hex(), "absent where the value is 0"),
        ("missing required", "0801 1a0a" + _LAYER.hex(), "max_context_tokens.*present"),
        ("no layers", "0801 1010", "layers.*present"),
        ("length past the end", "0801 1010 1a0b" + _LAYER.hex(), "11 bytes"),
        ("unknown kind", "0801 1010 1a0a 0803 1005 1801 2002 2803", "1 swa, 2 full.*found 3"),
        ("unknown encoding", "0804 1010 1a0a" + _LAYER.hex(), "1 f16le, 2 bf16le, 3 f32le"),
        ("window on a full layer", "0801 1010 1a0a 0802 1005 1801 2002 2803", "window_tokens"),
        ("no window on a ring", "0801 1010 1a08 0801 1801 2002 2803", "window_tokens"),
        ("a byte after", _GOOD.hex() + "1a", "whole varint"),
    ],
)  # fmt: skip
def test_every_other_encoding_is_refused(name: str, data: str, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        wire.decode_layout(bytes.fromhex(data))


def test_text_must_be_utf8_and_printable() -> None:
    data = wire.encode_numerics(NUMERICS)
    with pytest.raises(FormatError, match="UTF-8"):
        wire.decode_numerics(data.replace(b"cpu", b"c\xffu"))
    with pytest.raises(LimitError, match="printable"):
        wire.decode_numerics(data.replace(b"cpu", b"c\nu"))


def test_names_must_ascend() -> None:
    pair = b"\x0a\x06\x0a\x01%b\x12\x01v"
    assert wire.decode_numerics(pair % b"a" + pair % b"b")
    for first, second in ((b"b", b"a"), (b"a", b"a")):
        with pytest.raises(LimitError, match="ascending"):
            wire.decode_numerics(pair % first + pair % second)


def test_a_large_count_is_refused_before_it_is_built() -> None:
    run = bytes.fromhex("0a04 0801 1001")
    assert len(wire.decode_schedule(run * 2).runs) == 2
    at_cap = run * limits.SCHEDULE_RUNS_MAX
    scan(rules.SCHEDULE, at_cap, "schedule")
    with pytest.raises(LimitError, match=r"schedule\.runs.*65536"):
        scan(rules.SCHEDULE, at_cap + run, "schedule")


def test_a_message_longer_than_its_cap_is_refused_unread() -> None:
    with pytest.raises(LimitError, match="at most 262144 bytes"):
        wire.decode_identity(bytes(limits.IDENTITY_BYTES_MAX + 1))


def test_digests_depend_on_every_field() -> None:
    other = replace(LAYOUT, max_context_tokens=4095)
    variants = [
        replace(IDENTITY, tenant="b"),
        replace(IDENTITY, weights_digest=bytes(32)),
        replace(IDENTITY, quantisation="affine bits=4 group=64"),
        replace(IDENTITY, adapter_digest=bytes([9]) * 32),
        replace(IDENTITY, tokenizer_digest=bytes(32)),
        replace(IDENTITY, chat_template_digest=bytes([9]) * 32),
        replace(IDENTITY, engine_abi="abi/2"),
        replace(IDENTITY, layout=other),
        replace(IDENTITY, constants=()),
        replace(IDENTITY, constants=(("logit_scale", 0x3FF0000000000001), ("zero", 0))),
        IDENTITY,
    ]
    assert len({wire.identity_digest(identity) for identity in variants}) == len(variants)

    swa, full = LAYOUT.layers[:2]
    layouts = [
        LAYOUT,
        other,
        replace(LAYOUT, encoding=Encoding.BF16LE),
        replace(LAYOUT, layers=(full, swa, swa)),
        replace(LAYOUT, layers=(replace(swa, window_tokens=6), full, swa)),
        replace(LAYOUT, layers=(replace(swa, kv_heads=2, key_dim=1, rope=None), full, swa)),
        replace(LAYOUT, layers=(replace(swa, key_dim=3, value_dim=2), full, swa)),
        replace(LAYOUT, layers=(replace(swa, rope=None), full, swa)),
        replace(LAYOUT, layers=(replace(swa, rope=replace(ROPE, interleaved=False)), full, swa)),
        replace(LAYOUT, layers=(replace(swa, rope=replace(ROPE, theta_bits=1)), full, swa)),
        replace(LAYOUT, layers=(replace(swa, rope=replace(ROPE, scaling="yarn")), full, swa)),
    ]
    assert len({wire.layout_digest(layout) for layout in layouts}) == len(layouts)


def test_the_encoding_of_one_layout_is_frozen() -> None:
    # Bytes change only together with the specification. Written out by hand, field by field.
    rope = "09 0000000080841e41 1002 1802 2204 6e6f6e65"
    swa = f"0801 1005 1801 2002 2803 3213 {rope}"
    full = "0802 1801 2002 2803"
    expected = f"0801 108020 1a1f {swa} 1a08 {full} 1a1f {swa}"
    assert wire.encode_layout(LAYOUT) == bytes.fromhex(expected)


def test_most_of_a_manifest_has_a_plain_form() -> None:
    assert {"REFERENCE", "CALL_RUN", "ROPE", "PARENT"} <= set(_PLAIN)


@pytest.mark.parametrize("name", sorted(_PLAIN))
def test_the_scan_refuses_nothing_that_its_pattern_matches(name: str) -> None:
    rule = _PLAIN[name]
    assert rule.plain is not None

    @given(st.from_regex(rule.plain, fullmatch=True).filter(lambda d: len(d) <= rule.bytes_max))
    @settings(max_examples=60, deadline=None)
    def scanned_alone(data: bytes) -> None:
        scan(rule, data, name)  # The outermost message is always scanned, whatever it looks like.

    scanned_alone()


@pytest.mark.parametrize("high", [1, 2, 126, 127, 128, 200, 255, 16383, 16384, 4 << 20, 2**31 - 1])
def test_a_pattern_matches_no_number_above_its_cap_and_no_padded_one(high: int) -> None:
    rule = FieldRule("number", Kind.UINT, high, required=True)
    pattern = plain_pattern({1: rule})
    assert pattern is not None
    near = [edge + step for edge in (0, 127, 16383, 2**21, 2**28, high) for step in range(-2, 3)]
    for value in filter(lambda value: value >= 0, near):
        if pattern.fullmatch(b"\x08" + _varint(value)):
            assert 1 <= value <= high
        padded = _varint(value)[:-1] + bytes((_varint(value)[-1] | 0x80, 0))
        assert not pattern.fullmatch(b"\x08" + padded)
    assert pattern.fullmatch(b"\x08\x01")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
