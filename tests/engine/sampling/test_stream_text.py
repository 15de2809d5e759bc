"""Text that arrives in pieces equals text that arrives at once; nothing of a stop string leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from engine_support import ModelCase
from hypothesis import given, settings

from engine import Model, ModelFolderError
from engine.stream import TextStream
from engine.stream_bytes import TokenBytes, byte_fallback_bytes, byte_level_alphabet, decoder_kinds
from engine.stream_stop import first_stop
from kvpack.errors import LimitError

TEXT = "añb👨‍👩‍👧 שָׁלוֹם 漢字🏳️‍🌈 end"


def streamed(stops: Iterable[str], pieces: Iterable[bytes], *, restore: bool = False) -> list[str]:
    """What each piece released, then what the end did; restored from bytes after every piece."""
    stream = TextStream(tuple(stops))
    released = []
    for piece in pieces:
        text, stream = stream.push(piece)
        released.append(text)
        if restore:
            stream = TextStream.from_bytes(stream.to_bytes())
    return [*released, stream.finish()[0]]


def at_once(stops: Iterable[str], data: bytes) -> str:
    """The rule, over the whole text: character by character, the first stop to be complete."""
    text = data.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[first : first + size] for first in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_split_over_pieces_arrive_whole(size: int) -> None:
    released = streamed((), pieces_of(TEXT.encode(), size))
    assert "".join(released) == TEXT
    assert not any("\ufffd" in text for text in released)


def test_a_half_character_is_carried_over_a_hand_over() -> None:
    data = "x👨".encode()
    for cut in range(1, len(data)):
        text, stream = TextStream().push(data[:cut])
        rest, moved = TextStream.from_bytes(stream.to_bytes()).push(data[cut:])
        assert text + rest == "x👨"
        assert moved == TextStream()


def test_a_tail_that_never_came_is_one_replacement_character() -> None:
    for cut, expected in ((1, "x"), (2, "x\ufffd"), (3, "x\ufffd"), (4, "x\ufffd"), (5, "x👨")):
        data = "x👨".encode()[:cut]
        assert "".join(streamed((), [data])) == expected == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("STOP",), "before STOP after", "before "),
        (("aab",), "aaab tail", "a"),
        (("abcd", "bc"), "xabcd", "xa"),
        (("ab", "cab"), "xcab", "x"),
        (("ababac",), "abababac!", "ab"),
        (("👨‍👩‍👧",), "x👨‍👩‍👧y", "x"),
        (("é",), "caf" + "é" + "!", "caf"),
        (("\n\n",), "one\ntwo\n\nthree", "one\ntwo"),
        (("STOP",), "nearly STO and ST", "nearly STO and ST"),
        (("a", "b", "c", "d"), "xyzd", "xyz"),
        ((), "STOP", "STOP"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 9, 99])
@pytest.mark.parametrize("restore", [False, True])
def test_stops_cut_the_same_text_however_it_is_cut_up(
    stops: tuple[str, ...], text: str, expected: str, size: int, restore: bool
) -> None:
    released = streamed(stops, pieces_of(text.encode(), size), restore=restore)
    assert "".join(released) == expected == at_once(stops, text.encode())


SMALL = st.text(alphabet="abé👨", min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    stops=st.lists(SMALL, max_size=4),
    data=st.one_of(
        st.text(alphabet="abé👨", max_size=20).map(str.encode),
        st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xa9", b"\xf0\x9f", b"\xff"])).map(
            b"".join
        ),
    ),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_any_pieces_give_the_same_text(stops: list[str], data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    released = streamed(stops, pieces, restore=True)

    assert "".join(released) == at_once(stops, data)


@settings(max_examples=80, deadline=None)
@given(stop=SMALL, text=st.text(alphabet="abé👨", max_size=20))
def test_what_is_released_never_holds_the_beginning_of_a_stop_that_comes(
    stop: str, text: str
) -> None:
    stream, released = TextStream((stop,)), ""
    for character in text + stop:
        part, stream = stream.push(character.encode())
        released += part
        # As much is released as can be: all but the longest tail that a stop string begins with.
        if not stream.stopped:
            assert released + stream.held == (text + stop)[: len(released) + len(stream.held)]
            assert stop.startswith(stream.held)
    assert stream.stopped
    assert stop not in released
    assert released == (text + stop)[: first_stop(text + stop, (stop,))]


def test_nothing_comes_after_a_stop() -> None:
    _, stream = TextStream(("b",)).push(b"ab\xf0")
    assert stream == TextStream(("b",), stopped=True)
    assert stream.push(b"more") == ("", stream)
    assert stream.finish() == ("", stream)


def test_a_stop_is_found_in_a_tail_that_never_came() -> None:
    assert "".join(streamed(("b\ufffd",), [b"ab\xf0\x9f"])) == "a"


@pytest.mark.parametrize(
    "stops", [("a",) * 5, ("",), ("a", ""), ("x" * 257,), ("\ud800",)], ids=ascii
)
def test_bad_stop_strings_are_refused(stops: tuple[str, ...]) -> None:
    with pytest.raises(LimitError, match="stop"):
        TextStream(stops)


@pytest.mark.parametrize(
    ("pending", "held", "stopped"),
    [
        (b"a", "", False), (b"\xff", "", False), (b"\xf0\x9f\x91\xa8", "", False),
        (b"", "x", False), (b"", "ab", False), (b"", "xa", False),
        (b"\xf0", "", True), (b"", "a", True),
    ],
)  # fmt: skip
def test_a_stream_holds_only_what_it_could(pending: bytes, held: str, stopped: bool) -> None:
    with pytest.raises(LimitError, match="text"):
        TextStream(("ab",), pending, held, stopped)
    assert TextStream(("ab",), b"\xf0\x9f", "a")


def test_joined_bytes_are_what_the_tokenizer_decodes(
    load: Callable[[ModelCase], Model],
) -> None:
    model = load(ModelCase())
    token_bytes = model.token_bytes()
    ids = [*model.encode(TEXT), 257, 65, 319]
    stream, text = TextStream(), ""
    for token in ids:
        part, stream = stream.push(token_bytes(token))
        text += part
    assert text + stream.finish()[0] == model.decode(ids)
    for cut in range(len(ids)):
        pieces = [token_bytes(token) for token in ids[:cut]]
        assert "".join(streamed((), pieces)) == model.decode(ids[:cut])
    assert token_bytes(model.vocab_size + 5) == b""


def test_byte_level_alphabet_spells_every_byte_once() -> None:
    assert sorted(byte_level_alphabet().values()) == list(range(256))
    assert byte_level_alphabet()["Ġ"] == 0x20


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("<0xF0>", b"\xf0"),
        ("▁the", b" the"),
        ("<0xf0>", b"<0xf0>"),
        ("▁▁", b"  "),
        ("é", "é".encode()),
    ],
)
def test_byte_fallback_spellings(token: str, expected: bytes) -> None:
    assert byte_fallback_bytes(token) == expected


class _Decoder:
    def __init__(self, state: bytes) -> None:
        self.state = state

    def __getstate__(self) -> bytes:
        return self.state


class _Tokenizer:
    """As much of a fast tokenizer as the rule asks for."""

    def __init__(self, state: bytes | None) -> None:
        self.backend_tokenizer = self
        self.decoder = None if state is None else _Decoder(state)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return "▁<0x41>"[ids:]


def test_decoders_are_known_by_their_steps() -> None:
    fallback = (
        b'{"type":"Sequence","decoders":[{"type":"Replace"},{"type":"ByteFallback"},'
        b'{"type":"Sequence","decoders":[{"type":"Fuse"}]}]}'
    )
    assert decoder_kinds({"type": "ByteLevel"}) == ["ByteLevel"]
    found = TokenBytes.of(_Tokenizer(fallback))
    assert not found.byte_level
    assert found(1) == b"A"
    assert TokenBytes.of(_Tokenizer(b'{"type":"ByteLevel"}')).byte_level


@pytest.mark.parametrize("state", [None, b'{"type":"WordPiece"}', b'{"type":"Metaspace"}'])
def test_tokens_without_bytes_are_refused_by_name(state: bytes | None) -> None:
    with pytest.raises(ModelFolderError, match="tokenizer: "):
        TokenBytes.of(_Tokenizer(state))
