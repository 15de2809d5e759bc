"""What is fuzzed: each parser of kvpack beside the one of the second reader.

A target takes any bytes. kvpack must give a value or a ``KvpackError``, the second reader a value
or ``Refused``, and both the same of the two; everything else is a finding. For a manifest alone,
kvpack may refuse more: its values check at once what the gate asks later (steps 1, 2, 7 and 9).
Header and manifest together are asked of the gate too, and there the two agree again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpack.chunk import parse_chunk
from kvpack.chunk.codec import decompress
from kvpack.errors import KvpackError
from kvpack.header import decode_header
from kvpack.manifest import check_manifest
from kvpack.manifest.message import decode_message
from kvpack.manifest.sealed import read_unverified
from kvpack.wire import decode_identity
from tests.reference import gate
from tests.reference.bundle import Cursor, identity_digests, read_header
from tests.reference.chunk import TAG, join, parse_header
from tests.reference.scan import parse
from tests.reference.schemas import IDENTITY, MANIFEST
from tests.reference.verdict import Refused, need


class Disagreement(Exception):
    """One reader accepts what the other refuses."""


def _header(data: bytes) -> None:
    found = read_header(Cursor(data).read)
    need(len(found.raw) == len(data), "header", "bytes left over")
    identity = parse(IDENTITY, found.identity, "identity.scan")
    need(identity["tenant"] == found.tenant, "identity.scan", "another tenant")


def _identity(data: bytes) -> None:
    parse(IDENTITY, data, "identity.scan")


def _manifest(data: bytes) -> None:
    parse(MANIFEST, data, "manifest.scan")


def _our_manifest(data: bytes) -> object:
    return read_unverified(b"KVPM\x01\0\0\0" + len(data).to_bytes(4, "little") + data + bytes(32))


def _split(data: bytes) -> tuple[bytes, bytes]:
    """A header and a manifest's message, the header's length before them."""
    end = 4 + int.from_bytes(data[:4], "little")
    return data[4:end], data[end:]


def _gate(data: bytes) -> None:
    raw, message = _split(data)
    _header(raw)
    found = read_header(Cursor(raw).read)
    identity = parse(IDENTITY, found.identity, "identity.scan")
    manifest = parse(MANIFEST, message, "manifest.scan")
    drafts = [one["draft"]["identity"] for one in manifest["components"] if one["draft"]]
    digests = [identity_digests(one)[0] for one in (identity, *drafts)]
    gate.check(manifest, identity, digests, found.epoch)


def _our_gate(data: bytes) -> None:
    raw, message = _split(data)
    header = decode_header(raw)
    check_manifest(header, decode_message(message))


def _codec(data: bytes) -> None:
    join(data[3:], _plain_bytes(data))


def _our_codec(data: bytes) -> None:
    decompress(data[3:], _plain_bytes(data))


def _plain_bytes(data: bytes) -> int:
    """The size of the plaintext as a header would say it: inside the cap."""
    return (int.from_bytes(data[:3], "little") & 0x3FFFFF) + 1


def _chunk(data: bytes) -> None:
    found = parse_header(data)
    sealed = int(found.fields["encoded_bytes"]) + TAG
    need(len(data) == len(found.header) + sealed, "chunk.4", "another length")


_TARGETS: dict[str, tuple[Callable[[bytes], object], Callable[[bytes], object]]] = {
    "header": (decode_header, _header),
    "scan": (decode_identity, _identity),
    "manifest": (_our_manifest, _manifest),
    "chunk": (parse_chunk, _chunk),
    "gate": (_our_gate, _gate),
    "codec": (_our_codec, _codec),
}
NAMES = tuple(_TARGETS)


def run(name: str, data: bytes) -> bool:
    """Whether both accept ``data``.

    Raises:
        Disagreement: They differ.
    """
    ours, second = _TARGETS[name]
    verdicts = [_accepts(ours, data), _accepts(second, data)]
    stricter = name == "manifest" and verdicts == [False, True]
    if verdicts[0] != verdicts[1] and not stricter:
        raise Disagreement(f"{name}: kvpack {verdicts[0]}, reference {verdicts[1]}: {data.hex()}")
    return verdicts[0]


def _accepts(parser: Callable[[bytes], object], data: bytes) -> bool:
    try:
        parser(data)
    except (KvpackError, Refused):
        return False
    return True
