"""Canonical protobuf bytes of the values that describe rows, behind a strict scan."""

from kvpack.wire.messages import (
    decode_identity,
    decode_layout,
    decode_numerics,
    decode_schedule,
    encode_identity,
    encode_layout,
    encode_numerics,
    encode_schedule,
    identity_digest,
    layout_digest,
)

__all__ = [
    "decode_identity",
    "decode_layout",
    "decode_numerics",
    "decode_schedule",
    "encode_identity",
    "encode_layout",
    "encode_numerics",
    "encode_schedule",
    "identity_digest",
    "layout_digest",
]
