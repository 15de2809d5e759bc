"""Tokens' bytes in, text out: the part of a stream that has to travel with the session.

A character may be split over tokens, and a stop string over characters. What is not decided yet
is kept here and nowhere else, so a session that moves in the middle of an emoji or of half a stop
string continues with neither lost nor doubled.
"""

from __future__ import annotations

import codecs
import dataclasses
from dataclasses import dataclass
from typing import Final

from engine.sampling_record import RecordReader, RecordWriter
from engine.stream_stop import (
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    check_stops,
    first_stop,
    held_characters,
)
from kvpack.errors import FormatError, LimitError

#: A character has at most four bytes, so at most three wait for the rest.
PENDING_BYTES_MAX: Final = 3

_UTF8_BYTES_PER_CHARACTER: Final = 4
_MAGIC: Final = b"kvTX"
_VERSION: Final = 1

_decoder_type = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True, repr=False)
class TextStream:
    """A text that is being generated, as far as it is not released yet.

    A value: feeding it returns the text that is decided and the stream after it. Bytes that are no
    UTF-8 become U+FFFD, as when all bytes are decoded at once. At the end, the beginning of a
    character that never came becomes one U+FFFD; at a hand-over it travels instead.

    Attributes:
        stops: The stop strings.
        pending: The first bytes of a character whose last ones have not come.
        held: Text that may be the beginning of a stop string.
        stopped: A stop string was complete. Nothing comes any more.

    Raises:
        LimitError: Stop strings outside their caps, or text and bytes that no stream would hold.
    """

    stops: tuple[str, ...] = ()
    pending: bytes = b""
    held: str = ""
    stopped: bool = False

    def __post_init__(self) -> None:
        check_stops(self.stops)
        if self.stopped and (self.pending or self.held):
            raise LimitError("text.held", "nothing after a stop string", "text")
        if _decode(b"", self.pending) != ("", self.pending):
            raise LimitError("text.pending", "the beginning of a character", "other bytes")
        whole = first_stop(self.held, self.stops) is not None
        if whole or held_characters(self.held, self.stops) != len(self.held):
            raise LimitError("text.held", "the beginning of a stop string", "other text")

    def __repr__(self) -> str:
        return f"TextStream({len(self.stops)} stops, stopped={self.stopped})"

    def push(self, data: bytes) -> tuple[str, TextStream]:
        """The text that the bytes of a token decide, and the stream after them."""
        if self.stopped:
            return "", self
        text, pending = _decode(self.pending, data)
        return self._release(text, pending)

    def finish(self) -> tuple[str, TextStream]:
        """The rest of the text, when no more tokens come."""
        if self.stopped:
            return "", self
        text, _ = _decode(self.pending, b"", final=True)
        released, after = self._release(text, b"")
        return released + after.held, dataclasses.replace(after, held="")

    def _release(self, text: str, pending: bytes) -> tuple[str, TextStream]:
        text = self.held + text
        stop = first_stop(text, self.stops)
        if stop is not None:
            ended = dataclasses.replace(self, pending=b"", held="", stopped=True)
            return text[:stop], ended
        decided = len(text) - held_characters(text, self.stops)
        return text[:decided], dataclasses.replace(self, pending=pending, held=text[decided:])

    def to_bytes(self) -> bytes:
        """A record ``kvTX`` version 1: stop strings, pending bytes, held text, 1 if stopped."""
        record = RecordWriter(_MAGIC, _VERSION).u32(len(self.stops))
        for stop in self.stops:
            record.blob(stop.encode())
        record.blob(self.pending).blob(self.held.encode()).u32(int(self.stopped))
        return record.finish()

    @classmethod
    def from_bytes(cls, data: bytes) -> TextStream:
        """The stream whose record ``data`` is.

        Raises:
            FormatError: Another record, another version, cut short, too long or no UTF-8.
            LimitError: A field is outside its cap, or no stream would hold it.
        """
        record = RecordReader(data, _MAGIC, _VERSION, "text")
        most = _UTF8_BYTES_PER_CHARACTER * STOP_STRING_CHARACTERS_MAX
        stops = record.many("stops", STOP_STRINGS_MAX, lambda: record.blob("stops", most))
        pending = record.blob("pending", PENDING_BYTES_MAX)
        held = record.blob("held", most)
        stopped = record.u32("stopped")
        record.finish()
        if stopped > 1:
            raise FormatError("text.stopped", "0 or 1", stopped)
        return cls(tuple(_text(stop) for stop in stops), pending, _text(held), stopped == 1)


def _decode(pending: bytes, data: bytes, *, final: bool = False) -> tuple[str, bytes]:
    """The characters that are whole after ``pending`` and ``data``, and the bytes left over."""
    decoder = _decoder_type("replace")
    decoder.setstate((pending, 0))
    text = decoder.decode(data, final)
    return text, decoder.getstate()[0]


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise FormatError("text", "UTF-8", "other bytes") from None
