"""When chunks are compressed: a function of how fast the medium is, and of what the user said.

The codec costs both ends time and saves 13 to 18 % of K/V bytes. A prototype without content ids
gained all of that up to 7 Gb/s. A chunk of this format is hashed twice more, and on a busy core the
whole path breaks even at 4.2 Gb/s (ADR 7). So it is off unless somebody knows that the medium is
slower than that.

Asked once per transfer or per store, never per chunk: a chunk decides for itself only whether it
saved enough to be kept (:data:`kvpack.chunk.codec.SAVED_PER_MILLE_MIN`).
"""

from __future__ import annotations

import enum
from typing import Final

from kvpack import limits
from kvpack.codes import Codec

#: Up to this rate the whole path is never slower than without: the lowest break-even that was
#: measured, on two overloaded cores, lies just above it.
PAYS_UP_TO_BITS_PER_S: Final = 4_000_000_000

#: Rates above are mistakes of a unit: no link and no disk has a petabit per second.
_BITS_PER_S_MAX: Final = 10**15


class Compression(enum.Enum):
    """What the user said. OFF is the default everywhere."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


def choose_codec(wanted: Compression, bits_per_s: int | None) -> Codec:
    """The codec for everything that goes over one link or into one store.

    Args:
        wanted: OFF and ON are orders; AUTO asks the rate.
        bits_per_s: What the link carries, or what the store writes or reads, whichever is slower;
            None where nobody measured it, which counts as fast: an unknown medium is not slowed.

    Raises:
        LimitError: The rate is not a positive number of bits per second.
    """
    if bits_per_s is not None:
        limits.check_range("bits_per_s", bits_per_s, 1, _BITS_PER_S_MAX, "bits per second")
    if wanted is not Compression.AUTO:
        return Codec.ZSTD_SPLIT if wanted is Compression.ON else Codec.RAW
    pays = bits_per_s is not None and bits_per_s <= PAYS_UP_TO_BITS_PER_S
    return Codec.ZSTD_SPLIT if pays else Codec.RAW
