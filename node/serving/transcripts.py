"""Transcripts in the node's records: they outlive a restart, and a failure of the disk."""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import Final

from kvpack.errors import FormatError
from node.chat.transcripts import Transcript
from node.records import Records
from node.records.errors import RecordsError

log = logging.getLogger(__name__)

_U32: Final = 4


class KeptTranscripts:
    """A :class:`node.chat.transcripts.Transcripts` over records. What fails is a miss.

    A value is u32 little-endian numbers: dropped messages, then the token ids.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    async def get_transcript(
        self, tenant: str, digests: Sequence[bytes]
    ) -> tuple[int, Transcript] | None:
        """The first of ``digests`` that is kept."""
        try:
            found = await self._records.get_transcript(tenant, digests)
            return None if found is None else (found[0], decode_transcript(found[1]))
        except (RecordsError, FormatError) as error:
            log.warning("a transcript is not used: %s", error)
        return None

    async def put_transcript(self, tenant: str, digest: bytes, transcript: Transcript) -> None:
        """Keep ``transcript``."""
        try:
            await self._records.put_transcript(tenant, digest, encode_transcript(transcript))
        except RecordsError as error:
            log.warning("a transcript is not kept: %s", error)


def encode_transcript(transcript: Transcript) -> bytes:
    """``transcript`` as bytes."""
    numbers = (transcript.dropped_messages, *transcript.token_ids)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def decode_transcript(value: bytes) -> Transcript:
    """The transcript whose bytes ``value`` are.

    Raises:
        FormatError: They are none's.
    """
    if len(value) < 2 * _U32 or len(value) % _U32:
        raise FormatError("transcript", "u32 numbers, two at least", f"{len(value)} bytes")
    dropped, *token_ids = struct.unpack(f"<{len(value) // _U32}I", value)
    return Transcript(tuple(token_ids), dropped)
