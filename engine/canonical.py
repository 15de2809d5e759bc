"""One spelling per value, for digests. Needs no MLX."""

from __future__ import annotations

import json
import struct


def f64_bits(value: float) -> int:
    """The bits of ``value`` as an IEEE 754 double."""
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def canonical_json(value: object) -> bytes:
    """One spelling per value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode("ascii")
