"""Make a node's credentials folder out of certificates that somebody else renews (cert-manager).

A node reads files that are its own, 0600 and no links; what Kubernetes mounts from Secrets is
neither. So this copies, in two parts that differ in when they may run:

``own``
    The node's certificate and key, its authority and the tenant's key, before it starts. A pair
    that was renewed is shown from the next start on: by then every peer has pinned it.
``pins``
    The certificates of nodes and clients, for ever (or once, with ``--once``). A peer that was
    renewed is pinned beside its old leaf; the leaf before the old one goes. A peer whose file is
    gone is unpinned. Files of ``--copy`` are kept equal to what they are copied from.

Only certificates travel between pods. Prints what it changed; a peer that cannot be read is said
and left as it was, so that one bad certificate shuts nobody else out.
"""

from __future__ import annotations

import argparse
import stat
import sys
import time
from pathlib import Path
from typing import NoReturn

from kvpack.errors import KvpackError
from kvpack.keys import load_key_file
from node import certificates, enroll
from node.credentials import LEAVES_MAX, PinnedPeer, Role, load_credentials, pin, read_pins, unpin
from node.files import make_private_folder, replace_private

#: kubelet writes a changed Secret within about a minute; looking is a few stat calls.
PAUSE_S = 10.0

#: What is larger is no certificate and no key.
_BYTES_MAX = 64 << 10


def copy_own(folder: Path, own: Path, tenant_key: Path | None) -> None:
    """Put pair and authority of ``own`` (``tls.crt``, ``tls.key``, ``ca.crt``) and the key in.

    Raises:
        KvpackError: They do not belong together, or the tenant's key is another than before.
    """
    leaf, key, authority = (_read(own / name) for name in ("tls.crt", "tls.key", "ca.crt"))
    leaf_only = _first_of_chain(leaf)
    made_for = certificates.load_leaf(leaf_only, authority, "tls.crt").public_key()
    if certificates.load_key(key, "tls.key").public_key() != made_for:
        raise _Unusable("tls.crt: not for the key beside it")
    make_private_folder(folder)
    _replace(folder / enroll.AUTHORITY_CERTIFICATE, authority)
    # The order of a renewal: a cut between two of these leaves a pair that belongs together.
    if not (folder / enroll.NODE_KEY).exists():
        _replace(folder / enroll.NODE_KEY, key)
        _replace(folder / enroll.NODE_CERTIFICATE, leaf_only)
    elif (folder / enroll.NODE_KEY).read_bytes() != key:
        _replace(folder / enroll.NEXT_KEY, key)
        _replace(folder / enroll.NODE_CERTIFICATE, leaf_only)
        enroll.finish_renewal(folder)
    else:
        _replace(folder / enroll.NODE_CERTIFICATE, leaf_only)
    if tenant_key is not None:
        _put_tenant_key(folder / enroll.TENANT_KEY, _read(tenant_key))
    load_credentials(folder)


def make_private(folder: Path) -> None:
    """Take from others what they may do with ``folder`` and all that is in it.

    A volume that was mounted for a group (``fsGroup``), or restored, may give it more than a node
    accepts. Links are left alone.
    """
    for place in (folder, *folder.rglob("*")) if folder.is_dir() else ():
        mode = place.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077:
            place.chmod(stat.S_IMODE(mode) & 0o700)


def follow_pins(folder: Path, peers: Path) -> list[str]:
    """Pin what lies in ``peers/nodes`` and ``peers/clients`` as ``NAME.crt``; says what changed."""
    own = load_credentials(folder).name
    if not any((peers / role.value).is_dir() for role in Role):
        # A volume that is not there yet must not unpin everybody.
        raise _Unusable(f"{peers}: neither nodes/ nor clients/ is in it")
    changed: list[str] = []
    for role in Role:
        found = sorted((peers / role.value).glob("*.crt"))
        # kubelet keeps names of its own there, which begin with two dots.
        given = {path.stem: path for path in found if not path.name.startswith(".")}
        given.pop(own, None)
        held = {one.name for one in read_pins(folder, role)}
        for name in sorted(held - given.keys()):
            unpin(folder, name, role)
            changed.append(f"{role.value}/{name}: unpinned")
        for name, path in given.items():
            try:
                changed += _follow(folder, name, role, _first_of_chain(_read(path)))
            except KvpackError as error:
                changed.append(f"{role.value}/{name}: left as it was: {error}")
    return changed


def _follow(folder: Path, name: str, role: Role, leaf: bytes) -> list[str]:
    fresh = PinnedPeer.of(leaf, role)
    if fresh.name != name:
        raise _Unusable(f"a certificate of {fresh.name}")
    held = [one for one in read_pins(folder, role) if one.name == name]
    if any(one.digest == fresh.digest for one in held):
        return []
    # Room beside the present one: the older of two has not been shown since its successor was.
    oldest_first = sorted(held, key=_made)
    for one in oldest_first[: max(0, len(held) - LEAVES_MAX + 1)]:
        unpin(folder, name, role, one.digest.hex())
    pin(folder, leaf, role, beside_old=True)
    return [f"{role.value}/{name}: pinned {fresh.digest.hex()[:16]}"]


def follow_copies(copies: list[tuple[Path, Path]]) -> list[str]:
    """Keep private copies of files equal to them; says which changed."""
    changed = []
    for source, target in copies:
        content = _read(source)
        if not target.exists() or target.read_bytes() != content:
            make_private_folder(target.parent)
            _replace(target, content)
            changed.append(f"{target.name}: copied")
    return changed


class _Unusable(KvpackError):
    """A file is there and is not what it should be."""

    reason = "credentials"


def _made(peer: PinnedPeer) -> float:
    leaf = certificates.load_certificate(peer.certificate_pem, peer.name)
    return leaf.not_valid_before_utc.timestamp()


def _first_of_chain(pem: bytes) -> bytes:
    """The leaf alone: what an issuer puts behind it is in ``ca.crt``, too."""
    end = b"-----END CERTIFICATE-----"
    head, found, _ = pem.partition(end)
    return head + found + b"\n" if found else pem


def _put_tenant_key(path: Path, content: bytes) -> None:
    if not path.exists():
        _replace(path, content)
    elif path.read_bytes() != content:
        # Sessions and cuts of the old key would be lost to this node without a word.
        raise _Unusable(f"{path}: another tenant key than before; docs/operations.md, keys")
    load_key_file(path)


def _replace(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        replace_private(path, content)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as source:
            content = source.read(_BYTES_MAX + 1)
    except OSError as error:
        raise _Unusable(f"{path}: cannot be read ({error.strerror})") from error
    if len(content) > _BYTES_MAX:
        raise _Unusable(f"{path}: larger than {_BYTES_MAX} bytes")
    return content


def _copy(text: str) -> tuple[Path, Path]:
    source, colon, target = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FROM:TO")
    return Path(source), Path(target)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    own = parts.add_parser("own")
    own.add_argument("--credentials", type=Path, required=True, help="Folder to make.")
    own.add_argument("--own", type=Path, required=True, help="Folder with tls.crt, tls.key, ca.crt")
    own.add_argument("--tenant-key", type=Path, help="Key file of the tenant; clients need none.")
    own.add_argument("--private", type=Path, action="append", default=[], metavar="FOLDER")
    pins = parts.add_parser("pins")
    pins.add_argument("--credentials", type=Path, action="append", required=True, help="Of whom.")
    pins.add_argument("--peers", type=Path, required=True, help="Folder with nodes/ and clients/.")
    pins.add_argument("--once", action="store_true")
    for part in (own, pins):
        part.add_argument("--copy", type=_copy, action="append", default=[], metavar="FROM:TO")
    return parser.parse_args()


def _say(lines: list[str]) -> None:
    for line in lines:
        print(f"credentials_sync: {line}", flush=True)


def _fail(error: KvpackError) -> NoReturn:
    sys.exit(f"credentials_sync: error: {error}")


def main() -> None:
    """Do one part."""
    given = _arguments()
    if given.part == "own":
        for folder in (given.credentials, *given.private):
            make_private(folder)
        try:
            copy_own(given.credentials, given.own, given.tenant_key)
            _say(follow_copies(given.copy))
        except KvpackError as error:
            _fail(error)
        return
    while True:
        try:
            for folder in given.credentials:
                _say(follow_pins(folder, given.peers))
            _say(follow_copies(given.copy))
        except KvpackError as error:
            if given.once:
                _fail(error)
            _say([f"tried again in {PAUSE_S:.0f} s: {error}"])
        if given.once:
            return
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
