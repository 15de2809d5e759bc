"""Reads a vector, and asks kvpack and the second reader for their verdicts on it."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvpack.bundle import BundleReader, Depth, ForwardReader, verify_signed
from kvpack.errors import IncompleteError, KvpackError
from kvpack.keys import EpochKey, Keyring
from kvpack.verify import verify_bundle, verify_stream
from tests.reference.bundle import open_from_footer, verify_forwards
from tests.reference.keys import Roots
from tests.reference.signed import verify_signed as reference_signed
from tests.reference.verdict import Refused

FOLDER = Path(__file__).parents[2] / "vectors" / "v1"


def fold(reason: str) -> str:
    """Section 1: which of the two words a reader uses is its own; the exit code is one."""
    return "malformed" if reason == "over_limit" else reason


@dataclass(frozen=True)
class Verdict:
    """``reason`` is "ok" or a word of section 12; ``handed`` what was given out before it."""

    reason: str
    exit_code: int = 0
    stage: str = ""
    handed: str = ""

    @property
    def folded(self) -> str:
        """What every reader must agree on: ``over_limit`` is a kind of ``malformed``."""
        return fold(self.reason)


@dataclass(frozen=True)
class Vector:
    """A file of tests/vectors/v1, taken apart."""

    name: str
    fields: dict[str, str]
    data: bytes

    @property
    def signer(self) -> bytes:
        """The public key of a vector that is read without a root, or nothing."""
        kind, _, key = self.fields["key"].partition(" ")
        return bytes.fromhex(key) if kind == "signer" else b""

    @property
    def roots(self) -> Roots:
        """The roots that its reader holds."""
        found = (item.split() for item in self.fields["key"].split(", "))
        return {(tenant, int(epoch)): bytes.fromhex(root) for tenant, epoch, root in found}

    @property
    def expect(self) -> tuple[str, str]:
        """Reason and stage, from the footer and forwards alike."""
        reason, _, stage = self.fields["expect"].partition(" ")
        return reason, stage


def load(name: str) -> Vector:
    """The vector of this name."""
    head, _, data = (FOLDER / name).read_bytes().partition(b"\n\n")
    lines = head.decode().split("\n")
    return Vector(name, dict(line.split(": ", 1) for line in lines), data)


def names() -> list[str]:
    """All of them."""
    return sorted(path.name for path in FOLDER.iterdir())


def keyring(roots: Roots) -> Keyring:
    """The same keys, for kvpack."""
    return Keyring([EpochKey(*place, root) for place, root in roots.items()])


def _judged(ask: Callable[[list[bytes]], object]) -> Verdict:
    handed: list[bytes] = []
    found = ("ok", 0, "")
    try:
        ask(handed)
    except Refused as refused:
        found = (refused.reason, refused.exit_code, refused.stage)
    except KvpackError as refused:
        found = (refused.reason, refused.exit_code, str(refused))
    return Verdict(*found, blake3(b"".join(handed)).hexdigest())


def reference_from_footer(data: bytes, roots: Roots) -> Verdict:
    """The second reader, from the footer."""

    def ask(handed: list[bytes]) -> None:
        index, plaintexts = open_from_footer(data, roots)
        handed.extend(plaintexts)
        index.finish()

    return _judged(ask)


def reference_forwards(data: bytes, roots: Roots, deep: bool = False) -> Verdict:
    """The second reader, over a pipe."""
    return _judged(lambda _: verify_forwards(io.BytesIO(data), roots, deep).finish())


def kvpack_from_footer(data: bytes, keys: Keyring) -> Verdict:
    """kvpack by random access; chunks are handed out."""

    def ask(handed: list[bytes]) -> None:
        reader = BundleReader(io.BytesIO(data), keys)
        for chunk in reader.chunks():
            handed.append(bytes(chunk.plaintext))
        if reader.manifest.parent is not None:
            raise IncompleteError("x", 1)

    return _judged(ask)


def kvpack_checked(data: bytes, keys: Keyring, depth: Depth = Depth.FULL) -> Verdict:
    """kvpack on a file, as ``kvpack verify`` does it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return _judged(lambda _: verify_bundle(file.name, keys, depth))


def kvpack_piped(data: bytes, keys: Keyring, depth: Depth = Depth.FULL) -> Verdict:
    """kvpack on a pipe, as ``kvpack verify -`` does it."""
    return _judged(lambda _: verify_stream(io.BytesIO(data), keys, depth))


def kvpack_forwards(data: bytes, keys: Keyring) -> Verdict:
    """kvpack forwards, keeping the objects to hand them out."""

    def ask(handed: list[bytes]) -> None:
        reader = ForwardReader(io.BytesIO(data), keys, io.BytesIO())
        handed.extend(bytes(chunk.plaintext) for chunk in reader.chunks())

    return _judged(ask)


def signed_verdicts(data: bytes, signer: bytes) -> tuple[Verdict, Verdict]:
    """Both readers, without a root."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        ours = _judged(lambda _: verify_signed(Path(file.name), signer))
    return ours, _judged(lambda _: reference_signed(data, signer))
