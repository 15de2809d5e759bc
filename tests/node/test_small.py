"""Values and functions of the node that need no socket: pieces, states, plans, codes, addresses."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import DecodingState, SamplerState, SamplingParameters, TextStream
from kvpack.chunk import ChunkClass
from kvpack.errors import FormatError, KvpackError, LimitError, VersionError
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.snapshot import check_coverage, cut_tile_specs
from node import status
from node.config import Address
from node.errors import UsageError
from node.migration.tape import StateAt, Tape, TokenRange
from node.migration.timeline import Timeline
from node.migration.wire import (
    Cut,
    Held,
    decode_piece,
    encode_cut,
    encode_held,
    encode_object,
    encode_open,
    transfer_ref,
)
from node.pb.v1 import migration_pb2 as pb
from node.session import check_session_id
from node.state import (
    SessionState,
    decode_sampler,
    decode_state,
    encode_sampler,
    encode_state,
    with_boundary,
)


@given(st.binary(min_size=1, max_size=400))
def test_a_piece_written_by_hand_is_what_the_generated_class_writes(chunk):
    piece = encode_object(chunk)
    assert piece == pb.Piece(object=chunk).SerializeToString()
    assert decode_piece(piece) == chunk


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_384, 2 << 20])
def test_pieces_of_every_length_of_length_are_read_without_a_copy(size):
    piece = encode_object(bytes(size))
    view = decode_piece(piece)
    assert isinstance(view, memoryview) and len(view) == size
    assert view.obj is piece


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**62))
def test_the_opening_piece_names_the_transfer(epoch, number):
    ref = transfer_ref(epoch, number)
    assert decode_piece(encode_open(ref)) == ref


@given(st.binary(max_size=60))
@example(encode_object(b"chunk"))
@example(encode_held(bytes(32)))
@example(encode_cut(1))
@example(encode_open(transfer_ref(1, 2)))
def test_any_bytes_are_a_piece_or_a_format_error_and_pieces_are_canonical(message):
    try:
        piece = decode_piece(message)
    except FormatError:
        return
    assert encoded_again(piece) == message


def encoded_again(piece):
    if isinstance(piece, memoryview):
        return encode_object(bytes(piece))
    if isinstance(piece, Held):
        return encode_held(piece.seal_id)
    return encode_cut(piece.position) if isinstance(piece, Cut) else encode_open(piece)


STATES = st.builds(
    SessionState,
    st.integers(0, 2**24),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.lists(st.binary(min_size=1, max_size=30), max_size=4).map(tuple),
    st.sampled_from([b"", b"d" * 32]),
)


@given(STATES)
def test_a_session_state_comes_back(state):
    assert decode_state(encode_state(state)) == state


@given(st.binary(max_size=20))
def test_any_bytes_are_a_session_state_or_an_error_and_states_are_canonical(data):
    try:
        state = decode_state(data)
    except KvpackError:
        return
    assert encode_state(state) == data


def test_a_state_of_another_version_is_refused_by_its_number():
    with pytest.raises(VersionError, match="found 2"):
        decode_state(b"\x02" + encode_state(SessionState(5))[1:])
    with pytest.raises(VersionError, match="found 2"):
        decode_sampler(b"\x02" + encode_sampler(DecodingState())[1:])


def test_states_have_caps_and_never_show_their_messages():
    for values in (
        {"messages": (b"",)},
        {"messages": (b"x" * (1 << 20) + b"x",)},
        {"revision": -1},
        {"boundary_digest": b"x"},
        {"boundary_logits": b"x"},
        {"boundary_digest": bytes(32), "boundary_logits": bytes((1 << 20) + 1)},
    ):
        with pytest.raises(LimitError):
            SessionState(1, **values)
    with pytest.raises(LimitError):
        encode_state(SessionState(1, messages=(b"x" * (1 << 20),) * 3))
    assert "secret" not in repr(SessionState(1, messages=(b"secret",)))


def test_boundary_logits_stay_away_where_they_do_not_fit_beside_the_messages():
    short = SessionState(1, messages=(b"x" * 1000,))
    found = decode_state(encode_state(with_boundary(short, bytes(32), b"l" * (1 << 20))))
    assert (len(found.boundary_digest), len(found.boundary_logits)) == (32, 1 << 20)
    long = SessionState(1, messages=(b"x" * (1 << 20),) * 2 + (b"x" * 1000,))
    found = decode_state(encode_state(with_boundary(long, bytes(32), b"l" * (1 << 20))))
    assert (len(found.boundary_digest), len(found.boundary_logits)) == (32, 0)


def test_a_sampler_state_comes_back_with_its_numbers_and_its_text():
    sampler = SamplerState.begin(SamplingParameters(temperature=0.8, presence_penalty=0.5), 7, [1])
    _, text = TextStream(stops=("end",)).push(b"caf\xc3")
    state = DecodingState(sampler.uniform()[1], text)
    assert decode_sampler(encode_sampler(state)) == state


LAYOUT = CacheLayout(
    tuple(
        LayerLayout(LayerKind.FULL, None, 2, 4, 4)
        if index % 4 == 3
        else LayerLayout(LayerKind.SWA, 300, 2, 4, 4)
        for index in range(8)
    ),
    Encoding.F16LE,
    4096,
)


@given(st.integers(1, 2000), st.lists(st.integers(1, 512), max_size=12))
def test_a_known_tape_has_each_tile_once_and_none_after_its_rows_have_left(position, calls):
    tape = Tape.known(LAYOUT, position)
    index, before = 0, 0
    for call in [*calls, position]:
        after = min(position, before + call)
        while index < len(tape.items) and tape.rows_needed(index) <= after:
            item = tape.items[index]
            if not isinstance(item, (StateAt, TokenRange)) and item.kind is LayerKind.SWA:
                assert item.first_position >= max(0, after - 300)
            index += 1
        before = after
    assert index == len(tape.items)
    assert_whole(tape, position)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=6))
def test_a_growing_tape_takes_whole_blocks_and_leaves_the_rest_for_the_cut(steps):
    tape, position = Tape(LAYOUT), 0
    for step in steps:
        position += step
        tape.grow(position)
        assert all(spec.kind is LayerKind.FULL for spec in tape.items)
        assert all(spec.token_count == 256 for spec in tape.items)
    assert not tape.needs_cut(0)
    tape.close(position)
    assert tape.needs_cut(tape.cut_index) and not tape.needs_cut(tape.cut_index - 1)
    assert_whole(tape, position)
    with pytest.raises(RuntimeError):
        tape.grow(position + 256)


@given(st.integers(1, 2000), st.integers(0, 2000))
def test_what_waits_for_the_last_rows_is_in_the_order_of_layers_and_nothing_else_moves(end, rows):
    tape, rows = Tape.known(LAYOUT, end), min(rows, end)
    before = list(tape.items)
    rest = tape.arrange_rest(rows)
    sent = len(before) - len(rest)
    assert tape.items == [*before[:sent], *rest]
    assert all(tape.rows_needed(index) <= rows for index in range(sent))
    assert all(spec.end_position > rows for spec in rest)
    assert [max(spec.layers) for spec in rest] == sorted(max(spec.layers) for spec in rest)
    assert_whole(tape, end)


def assert_whole(tape, position):
    tiles = [item for item in tape.items if not isinstance(item, (StateAt, TokenRange))]
    assert sorted(map(repr, tiles)) == sorted(map(repr, cut_tile_specs(LAYOUT, position)))
    check_coverage(LAYOUT, position, tiles)
    rest = [item for item in tape.items if isinstance(item, (StateAt, TokenRange))]
    assert rest == [
        TokenRange(0, position),
        StateAt(position, ChunkClass.SESSION),
        StateAt(position, ChunkClass.SAMPLER),
    ]


def test_what_the_boundary_call_overwrites_is_known_to_the_tape():
    tape = Tape.known(LAYOUT, 1000)
    marked = [item for item in tape.items if tape.overwritten_next(item)]
    assert marked and all(item.first_position == 700 for item in marked)
    assert {layer for item in marked for layer in item.layers} == {0, 1, 2, 4, 5, 6}
    early = Tape.known(LAYOUT, 299)
    assert not any(early.overwritten_next(item) for item in early.items)


def test_a_timeline_counts_what_was_sent_after_zero_as_exposed():
    timeline = Timeline(1.0, zero_s=5.0, committed_s=5.5)
    for at_s, chunk_class, size in (
        (2.0, ChunkClass.TOKEN_IDS, 100),
        (4.9, ChunkClass.FULL, 700),
        (5.1, ChunkClass.FULL, 150),
        (5.2, ChunkClass.SWA, 50),
    ):
        timeline.add(at_s, SimpleNamespace(chunk_class=chunk_class, plain_bytes=size))
    assert timeline.payload_bytes == 1000
    assert timeline.payload_bytes_after_zero == 200
    assert timeline.hidden_fraction == 0.8
    assert timeline.exposed_handover_s == 0.5
    assert timeline.bytes_of(ChunkClass.FULL) == 850


_LIST_MISSING = """
import engine.install, engine.mlxlm, node.server
from kvpack.errors import KvpackError
from node.status import CODES

def classes(root):
    yield root
    for child in root.__subclasses__():
        yield from classes(child)

print(*sorted({f"{c.__module__}.{c.__name__}" for c in classes(KvpackError)} -
              {f"{c.__module__}.{c.__name__}" for c in CODES}))
"""


def test_the_status_table_names_every_error_class_that_a_server_process_knows():
    # In a process of its own: other tests import commands whose errors no call can raise.
    listed = subprocess.run(
        [sys.executable, "-c", _LIST_MISSING], capture_output=True, text=True, check=True
    )
    assert listed.stdout.split() == []
    assert grpc.StatusCode.OK not in status.CODES.values()


def test_reasons_are_stable_words_and_codes_follow_the_nearest_class():
    for kind in status.CODES:
        assert kind.reason.isidentifier() and kind.reason.islower()
    assert status.code_of(UsageError("x")) is grpc.StatusCode.INVALID_ARGUMENT

    class Newer(UsageError):
        """Not in the table."""

    assert status.code_of(Newer("x")) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["127.0.0.1:0", "localhost:65535", "[::1]:7411"])
def test_addresses_come_back_as_they_were(text):
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", ":1", "host", "host:", "host:x", "host:-1", "host:65536", "host:١", "a b:1"]
)
def test_other_addresses_are_a_usage_error(text):
    with pytest.raises(UsageError):
        Address.parse(text)


@pytest.mark.parametrize("name", ["a", "A1.b-c_d", "0", "x" * 100])
def test_session_ids_that_any_disk_can_hold(name):
    assert check_session_id(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "/a", "a/b", "a\\b", "a\0", "x:y", "%2e%2e", ".a", "-a", "x" * 101,
     "ä", "a\n", "a b"],
)  # fmt: skip
def test_session_ids_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(LimitError) as refused:
        check_session_id(name)
    assert not name or name not in str(refused.value) or len(name) == 1
