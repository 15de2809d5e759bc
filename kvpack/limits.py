"""Caps of the format. Every cap is checked before memory is taken for what it bounds.

Each constant states its unit in its name and its reason beside it. A value above a cap is refused
with :class:`kvpack.errors.LimitError`, which names the field, the cap and what was found.
"""

from __future__ import annotations

from typing import Final

from kvpack.errors import LimitError
from kvpack.printable import is_printable

#: Rows of K/V are sealed on one fixed grid, whatever the prefill chunks were, so that equal rows
#: give equal chunks. 256 is the growth step of mlx-lm and divides the 512-token prefill grid.
GRID_TOKENS: Final = 256

#: A chunk aims at this many plaintext bytes: large enough that framing vanishes, small enough to
#: stay under gRPC's default 4 MiB message limit and in a core's second-level cache.
CHUNK_TARGET_BYTES: Final = 2 << 20

#: No chunk holds more plaintext than this: it bounds what a reader allocates for one chunk.
CHUNK_PLAINTEXT_BYTES_MAX: Final = 4 << 20

#: K plus V of one layer for one token. 256 such rows must fit one chunk (16 KiB x 256 = 4 MiB).
ROW_BYTES_MAX: Final = CHUNK_PLAINTEXT_BYTES_MAX // GRID_TOKENS

#: The deepest published decoder has 126 layers; four times that leaves room.
LAYERS_MAX: Final = 512

#: Layers count from 0: no chunk header and no reference can name one above this.
LAYER_INDEX_MAX: Final = LAYERS_MAX - 1

#: Heads and head sizes beyond these do not exist; their product is bounded by ROW_BYTES_MAX.
KV_HEADS_MAX: Final = 1024
HEAD_DIM_MAX: Final = 4096

#: Positions are below 2^24 (16.7 million tokens), above any published context length.
POSITION_MAX: Final = 1 << 24

#: Token ids fit in four bytes on disk; the largest published vocabulary is 262,144.
TOKEN_ID_MAX: Final = (1 << 31) - 1

#: Token ids are sealed in ranges of this many tokens (256 KiB a chunk).
TOKEN_IDS_PER_CHUNK: Final = 65_536

#: Names (tenant, engine ABI, constants, versions) are short labels, not documents.
NAME_BYTES_MAX: Final = 256

#: Named constants and switches an identity or a fingerprint may carry.
NAMED_VALUES_MAX: Final = 256

#: Tokens of one speculative block. A checkpoint retains that many rows of each ring, whatever the
#: context's length; published drafters propose blocks of 16.
SPECULATIVE_BLOCK_TOKENS_MAX: Final = 16

#: Runs of a call schedule: one per change of call size. A chat of 10,000 turns needs about 20,000.
SCHEDULE_RUNS_MAX: Final = 65_536

#: Epochs are counted from 1 and rotate rarely.
EPOCH_MAX: Final = (1 << 31) - 1

#: The identity of the largest layout (512 layers, long RoPE texts) and all its constants take
#: 222,000 bytes; a header is read whole before anything in it can be authenticated.
IDENTITY_BYTES_MAX: Final = 256 << 10

#: References of one bundle: 128 GiB of chunks of the target size. A reader holds one object for
#: each, so this and not the payload decides what it may need: 65,536 take about 50 MiB.
REFERENCES_MAX: Final = 65_536

#: A manifest is read whole before it can be authenticated. All references with short layer lists
#: and a full schedule take 8 MiB.
MANIFEST_BYTES_MAX: Final = 16 << 20

#: Pieces of one component's payload (draft, session, sampler): 255 x 4 MiB.
PART_MAX: Final = 254

#: A delta names its parent, that one another: each level is one more pack that must be at hand.
PARENT_DEPTH_MAX: Final = 7

#: A bundle is at most this long: all references, each with the largest chunk, are below 2^39 bytes.
BUNDLE_BYTES_MAX: Final = 1 << 40

#: A key file is five short lines.
KEY_FILE_BYTES_MAX: Final = 1024


def check_range(field: str, value: int, low: int, high: int, unit: str = "") -> int:
    """Return ``value`` if ``low <= value <= high``.

    Args:
        field: The field's path, as it appears in the error.
        value: What was found.
        low: Smallest permitted value.
        high: Largest permitted value.
        unit: Unit for the message, e.g. ``"bytes"``.

    Raises:
        LimitError: ``value`` is not an integer in the range.
    """
    # An exact type keeps True and False out, and is asked once per field of every chunk.
    if type(value) is not int or not low <= value <= high:
        raise LimitError(field, f"{low} to {high} {unit}".rstrip(), value)
    return value


def check_name(field: str, value: str) -> str:
    """Return ``value`` if it is 1 to ``NAME_BYTES_MAX`` bytes of printable UTF-8.

    Raises:
        LimitError: It is empty, too long or holds a code point of :mod:`kvpack.printable`.
    """
    encoded = value.encode("utf-8", errors="replace")
    if not 1 <= len(encoded) <= NAME_BYTES_MAX or not is_printable(value):
        raise LimitError(field, f"1 to {NAME_BYTES_MAX} printable bytes", f"{len(encoded)} bytes")
    return value
