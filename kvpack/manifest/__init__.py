"""Manifests: what a pack holds, sealed as stored bytes and gated before anything is read."""

from kvpack.codes import ComponentKind, WindowRule
from kvpack.manifest.binding import Bindings
from kvpack.manifest.gate import check_manifest
from kvpack.manifest.message import KnownReferences, encode_reference
from kvpack.manifest.model import (
    Component,
    DraftModel,
    ForeignRingHead,
    Manifest,
    ParentReference,
)
from kvpack.manifest.sealed import manifest_id, open_manifest, read_unverified, seal_manifest

__all__ = [
    "Bindings",
    "Component",
    "ComponentKind",
    "DraftModel",
    "ForeignRingHead",
    "KnownReferences",
    "Manifest",
    "ParentReference",
    "WindowRule",
    "check_manifest",
    "encode_reference",
    "manifest_id",
    "open_manifest",
    "read_unverified",
    "seal_manifest",
]
