"""Certificates of two ends that trust each other, thrown away with the folder that they lie in."""

from __future__ import annotations

import ssl
from pathlib import Path

from node import enroll

ENDS = ("source", "target")


def make(folder: Path) -> Path:
    """One authority and a leaf for each end, in a new folder."""
    folder.mkdir(mode=0o700)
    for name in ENDS:
        enroll.enroll(folder / "authority", folder / name, name)
    return folder


def authority_pem(folder: Path, end: str) -> bytes:
    return (folder / end / enroll.AUTHORITY_CERTIFICATE).read_bytes()


def leaf_pem(folder: Path, end: str) -> tuple[bytes, bytes]:
    """Certificate and key."""
    own = folder / end
    return (own / enroll.NODE_CERTIFICATE).read_bytes(), (own / enroll.NODE_KEY).read_bytes()


def context(folder: Path, end: str) -> ssl.SSLContext:
    """TLS 1.3, both ends show a certificate and check the other's."""
    target = end == "target"
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if target else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    own = folder / end
    made.load_verify_locations(own / enroll.AUTHORITY_CERTIFICATE)
    made.load_cert_chain(own / enroll.NODE_CERTIFICATE, own / enroll.NODE_KEY)
    return made
