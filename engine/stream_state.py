"""Everything of a stream that is not rows: how the next token is chosen, what of the text waits.

This is what a session carries besides its tokens and its cache; restoring it continues the same
stream, number for number and character for character.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from engine.sampling_record import RecordReader, RecordWriter
from engine.sampling_state import SamplerState
from engine.stream import TextStream

_MAGIC: Final = b"kvDS"
_VERSION: Final = 1

#: Far above the largest of both parts: 1,024 biases, 4,096 tokens, four stop strings.
_PART_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class DecodingState:
    """Sampler and text of one stream, at one token.

    Attributes:
        sampler: How the next token is chosen.
        text: What of the text so far is not released yet.
    """

    sampler: SamplerState = dataclasses.field(default_factory=SamplerState.greedy)
    text: TextStream = dataclasses.field(default_factory=TextStream)

    def to_bytes(self) -> bytes:
        """A record ``kvDS`` version 1: the sampler's record, then the text's."""
        record = RecordWriter(_MAGIC, _VERSION)
        return record.blob(self.sampler.to_bytes()).blob(self.text.to_bytes()).finish()

    @classmethod
    def from_bytes(cls, data: bytes) -> DecodingState:
        """The state whose record ``data`` is.

        Raises:
            FormatError: Another record, another version, cut short or too long.
            LimitError: A field is outside its cap.
        """
        record = RecordReader(data, _MAGIC, _VERSION, "decoding")
        sampler = record.blob("sampler", _PART_BYTES_MAX)
        text = record.blob("text", _PART_BYTES_MAX)
        record.finish()
        return cls(SamplerState.from_bytes(sampler), TextStream.from_bytes(text))
