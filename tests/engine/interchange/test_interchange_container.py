"""The container: its header, its tensors and its length agree, or nothing in it is used.

Files are cut, lengthened, and made to lie about every size, offset and count they state.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from cache_file_kit import DIM, HEADS, POSITION, W, blank_file, encoded, raw_header, with_header
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interchange_cache import read_layers
from engine.interchange_file import ENTRIES_MAX, HEADER_BYTES_MAX, parse_tensor_file
from kvpack.errors import EXIT_MALFORMED, FormatError, KvpackError
from kvpack.interchange import CacheFileError, CacheFormatError


def duplicate(text: str) -> bytes:
    data = encoded(blank_file())
    length = int.from_bytes(data[:8], "little")
    return raw_header(data[8 : 8 + length].rstrip()[:-1] + text.encode() + b"}", data[8 + length :])


def move(name: str, first: int, end: int) -> bytes:
    return with_header(lambda header: header[name].update(data_offsets=[first, end]))


def lie(name: str, **fields: object) -> bytes:
    return with_header(lambda header: header[name].update(fields))


EMPTY = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
ROW_BYTES = 2 * HEADS * W * DIM
CONTAINERS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "seven bytes": lambda: bytes(7),
    "length zero": lambda: bytes(8) + b"{}",
    "length one": lambda: raw_header(b"{"),
    "length 2^31": lambda: (1 << 31).to_bytes(8, "little") + b"{}",
    "length 2^63": lambda: (1 << 63).to_bytes(8, "little") + b"{}",
    "length -1": lambda: b"\xff" * 8 + b"{}",
    "header of a GiB": lambda: (1 << 30).to_bytes(8, "little") + b"{}" + bytes(1000),
    "header above the cap": lambda: raw_header(b"{" + b" " * HEADER_BYTES_MAX + b"}"),
    "not UTF-8": lambda: raw_header(b'{"\xff": 1}'),
    "not JSON": lambda: raw_header(b"{]"),
    "a list": lambda: raw_header(b"[]"),
    "a space first": lambda: raw_header(b" {}"),
    "two objects": lambda: raw_header(b"{}{}"),
    "NaN": lambda: raw_header(b'{"a": NaN}'),
    "1e400": lambda: raw_header(b'{"a": 1e400}'),
    "a float": lambda: lie("0.2", data_offsets=[0.0, 4.0]),
    "ten thousand digits": lambda: raw_header(b'{"a": ' + b"9" * 10_000 + b"}"),
    "nested 100,000 deep": lambda: raw_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a tensor twice": lambda: duplicate(',"0.2":{"dtype":"I32","shape":[],"data_offsets":[0,4]}'),
    "metadata twice": lambda: duplicate(',"__metadata__":{"2.0":""}'),
    "a field twice": lambda: raw_header(
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "metadata with a number": lambda: with_header(lambda h: h["__metadata__"].update(a=1)),
    "metadata no object": lambda: with_header(lambda h: h.update(__metadata__=[])),
    "a field too many": lambda: lie("0.2", more=1),
    "a field missing": lambda: with_header(lambda h: h["0.2"].pop("shape")),
    "a tensor no object": lambda: with_header(lambda h: h.update({"0.2": 5})),
    "unknown dtype": lambda: lie("0.2", dtype="F8_E4M3"),
    "dtype a list": lambda: lie("0.2", dtype=["I32"]),
    "shape a number": lambda: lie("0.2", shape=4),
    "negative dimension": lambda: lie("0.0", shape=[1, -HEADS, -W, DIM]),
    "dimension true": lambda: lie("0.2", shape=[True]),
    "product beyond 64 bits": lambda: lie("0.0", shape=[1 << 40, 1 << 40, 1 << 40]),
    "dimension beyond 64 bits": lambda: lie("0.0", shape=[1 << 70]),
    "a hundred axes": lambda: lie("0.2", shape=[1] * 100),
    "larger than its bytes": lambda: lie("0.0", shape=[1, HEADS, W + 1, DIM]),
    "smaller than its bytes": lambda: lie("0.0", shape=[1, HEADS, W - 1, DIM]),
    "one offset": lambda: lie("0.2", data_offsets=[0]),
    "three offsets": lambda: lie("0.2", data_offsets=[0, 4, 8]),
    "offsets reversed": lambda: move("0.0", ROW_BYTES, 0),
    "past the end": lambda: move("0.0", 1 << 40, (1 << 40) + ROW_BYTES),
    "negative offset": lambda: move("0.0", -ROW_BYTES, 0),
    "overlapping": lambda: move("0.1", 0, ROW_BYTES),
    "a gap": lambda: move("0.0", 1, ROW_BYTES + 1),
    "a byte appended": lambda: encoded(blank_file()) + b"\0",
    "another file appended": lambda: encoded(blank_file()) * 2,
    "too many tensors": lambda: raw_header(
        json.dumps(dict.fromkeys(map(str, range(ENTRIES_MAX + 1)), EMPTY)).encode()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_damaged_container_is_refused(name: str) -> None:
    with pytest.raises(CacheFileError) as caught:
        read_layers(parse_tensor_file(CONTAINERS[name]()))
    assert len(str(caught.value)) < 400
    assert caught.value.exit_code == EXIT_MALFORMED


def test_every_cut_is_refused() -> None:
    data = encoded(blank_file("RF", position=2))
    lengths = [*range(1200), *range(1200, len(data), 997), len(data) - 1]
    for length in lengths:
        with pytest.raises(CacheFileError):
            parse_tensor_file(data[:length])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_changed_header_byte_never_escapes_the_errors(data: st.DataObject) -> None:
    """Whatever one byte of the header becomes: an error of ours, or a file that is still whole."""
    good = encoded(blank_file())
    length = int.from_bytes(good[:8], "little")
    place = data.draw(st.integers(0, 8 + length - 1))
    changed_to = data.draw(st.integers(0, 255))
    bad = good[:place] + bytes([changed_to]) + good[place + 1 :]
    try:
        layers = read_layers(parse_tensor_file(bad))
    except (CacheFileError, CacheFormatError):
        return
    # What is still accepted differs in what a name or a model path says, never in a size.
    assert [layer.keys.shape for layer in layers] == [
        layer.keys.shape for layer in read_layers(parse_tensor_file(good))
    ]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_a_file_or_an_error_of_ours(data: bytes, framed: bool) -> None:
    for candidate in (data, raw_header(b"{" + data + b"}") if framed else data):
        try:
            read_layers(parse_tensor_file(candidate))
        except KvpackError as error:
            assert isinstance(error, FormatError)
        else:
            pytest.fail("there is no such cache")


def test_a_header_with_spare_room_is_read_alike() -> None:
    """mlx-lm and others pad with spaces; the order of names and tensors is theirs to choose."""
    good = encoded(blank_file())
    length = int.from_bytes(good[:8], "little")
    text = good[8 : 8 + length].rstrip()
    for padded in (text, text + b" " * 100):
        data = raw_header(padded, good[8 + length :])
        assert read_layers(parse_tensor_file(data))[0].offset == POSITION


def test_the_cap_on_tensors_has_a_file_at_it() -> None:
    header = json.dumps(dict.fromkeys(map(str, range(ENTRIES_MAX)), EMPTY)).encode()
    assert len(parse_tensor_file(raw_header(header)).tensors) == ENTRIES_MAX
    with pytest.raises(CacheFileError, match=f"at most {ENTRIES_MAX} tensors"):
        parse_tensor_file(CONTAINERS["too many tensors"]())


def test_the_cap_on_the_header_has_a_file_at_it() -> None:
    header = b"{" + b" " * (HEADER_BYTES_MAX - 2) + b"}"
    assert parse_tensor_file(raw_header(header)).tensors == {}
