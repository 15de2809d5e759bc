"""Bundles: one session in one ``.kvpack`` file, written and read in one forward pass."""

from kvpack.bundle.footer import Footer
from kvpack.bundle.forward import ForwardReader
from kvpack.bundle.index import BundleIndex
from kvpack.bundle.payload import Depth
from kvpack.bundle.reader import BundleReader
from kvpack.bundle.signed import verify_signed
from kvpack.bundle.snapshots import (
    DraftSnapshot,
    draft_context,
    parse_token_ids,
    read_draft_snapshot,
    read_snapshot,
    require_whole,
    write_snapshot,
)
from kvpack.bundle.writer import BundleWriter
from kvpack.header import Header, decode_header, encode_header
from kvpack.publish import publish_new

__all__ = [
    "BundleIndex",
    "BundleReader",
    "BundleWriter",
    "Depth",
    "DraftSnapshot",
    "Footer",
    "ForwardReader",
    "Header",
    "decode_header",
    "draft_context",
    "encode_header",
    "parse_token_ids",
    "publish_new",
    "read_draft_snapshot",
    "read_snapshot",
    "require_whole",
    "verify_signed",
    "write_snapshot",
]
