"""A credentials folder as a value, the pins in it, and how a running node follows its changes.

A pin is a file ``nodes/NAME.pem`` or ``clients/NAME.pem``. While a peer renews its certificate a
second leaf of the same name lies beside it as ``NAME.DIGEST.pem``, and both are let in until one
is unpinned. Names hold no dot, so the two forms cannot be confused.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from node import certificates, enroll
from node.certificates import leaf_digest
from node.errors import CredentialsError
from node.files import make_private_folder, read_public, remove_private, write_private

log = logging.getLogger(__name__)

#: Leaves that may be pinned for one name: the present one, and the one that takes its place.
LEAVES_MAX: Final = 2

#: Pins of one role. Every one is read again when the folder changes.
PINS_MAX: Final = 1024

#: Hexadecimal digits of a leaf's digest in a file name or on a terminal.
_SHORT: Final = 16


class Role(enum.Enum):
    """What a pinned peer is, and the folder of its pin."""

    NODE = "nodes"
    CLIENT = "clients"


@dataclass(frozen=True, slots=True)
class PinnedPeer:
    """One pinned leaf: whose it is, and what it may call.

    Attributes:
        name: The common name and only DNS name of the certificate.
        role: What it may call.
        certificate_pem: The leaf.
        digest: SHA-256 of the leaf's DER, 32 bytes.
    """

    name: str
    role: Role
    certificate_pem: bytes
    digest: bytes

    @classmethod
    def of(cls, certificate_pem: bytes, role: Role) -> PinnedPeer:
        """The pin of a certificate.

        Raises:
            CredentialsError: Not a certificate, or one with a name that cannot be pinned.
        """
        certificate = certificates.load_certificate(certificate_pem, "certificate")
        name = certificates.check_name(certificates.common_name(certificate.subject))
        return cls(name, role, certificate_pem, leaf_digest(certificate_pem))

    def why_invalid(self, now: certificates.Now = certificates.utc_now) -> str | None:
        """Why the leaf is not valid now (expired, early), or ``None``."""
        certificate = certificates.load_certificate(self.certificate_pem, self.name)
        return certificates.not_valid_because(certificate, now())


@dataclass(frozen=True, slots=True)
class Credentials:
    """A node's or client's key, certificate and pins, as loaded from one folder."""

    name: str
    certificate_pem: bytes
    authority_pem: bytes
    peers: tuple[PinnedPeer, ...]
    key_pem: bytes = field(repr=False)

    def current(self, max_age_s: float = 0.0) -> Credentials:
        """Itself: a value that never changes, where :class:`LiveCredentials` follow a folder."""
        return self

    def peer(self, name: str, role: Role = Role.NODE) -> PinnedPeer:
        """A pinned leaf of that name.

        Raises:
            CredentialsError: It is not pinned here.
        """
        for peer in self.peers:
            if peer.name == name and peer.role is role:
                return peer
        raise CredentialsError(f"{name}: no pinned certificate of that name under {role.value}/")

    def leaves(self, peer: PinnedPeer) -> list[PinnedPeer]:
        """Every leaf that is pinned under the name and role of ``peer``: one, or two."""
        same = [p for p in self.peers if p.name == peer.name and p.role is peer.role]
        return same or [peer]


def pin(
    folder: Path, certificate_pem: bytes, role: Role, *, beside_old: bool = False
) -> PinnedPeer:
    """Pin a peer's leaf in the credentials folder ``folder``. Pinning it again changes nothing.

    Args:
        folder: A credentials folder.
        certificate_pem: The peer's leaf.
        role: What it may call.
        beside_old: Whether another leaf of that name may stay pinned: the peer renewed its own.

    Raises:
        CredentialsError: Not a usable certificate, or another leaf of that name is pinned.
    """
    peer = PinnedPeer.of(certificate_pem, role)
    make_private_folder(folder / role.value)
    path = plan_pin(folder, peer, beside_old=beside_old)
    if path is not None:
        write_private(path, certificate_pem)
    return peer


def plan_pin(folder: Path, peer: PinnedPeer, *, beside_old: bool) -> Path | None:
    """Where the pin of ``peer`` would be written; ``None`` if it is there already.

    Raises:
        CredentialsError: Another leaf of that name is pinned and ``beside_old`` is not set, or
            there is no room beside it.
    """
    same = [p for p in read_pins(folder, peer.role) if p.name == peer.name]
    if any(p.digest == peer.digest for p in same):
        return None
    _check_room(same, peer, beside_old)
    stem = f"{peer.name}.{peer.digest.hex()[:_SHORT]}" if same else peer.name
    return folder / peer.role.value / f"{stem}.pem"


def unpin(folder: Path, name: str, role: Role, leaf: str | None = None) -> list[PinnedPeer]:
    """Remove the pins of ``name``, or only the leaf whose digest begins with ``leaf``.

    Returns:
        The pins that were removed, at least one.

    Raises:
        CredentialsError: Nothing of that name, or no such leaf of it, is pinned; or ``leaf`` fits
            several.
    """
    fitting = [
        peer
        for peer in read_pins(folder, role)
        if peer.name == name and peer.digest.hex().startswith(leaf or "")
    ]
    if not fitting:
        which = "" if leaf is None else f" whose digest begins with {leaf}"
        raise CredentialsError(f"{name}: no pinned certificate under {role.value}/{which}")
    if leaf is not None and len(fitting) > 1:
        raise CredentialsError(
            f"{name}: {len(fitting)} leaves begin with {leaf!r}; give more of it"
        )
    for peer in fitting:
        remove_private(_path_of(folder, peer))
    return fitting


def read_pins(folder: Path, role: Role) -> list[PinnedPeer]:
    """Every pin of a role.

    Raises:
        CredentialsError: One is broken, or is not named after its certificate.
    """
    return [_read_pin(path, role) for path in _pin_files(folder, role)]


def load_credentials(folder: Path) -> Credentials:
    """Read a credentials folder: key, certificate, authority and pins.

    Raises:
        CredentialsError: A file is missing, too open, a link, or they do not belong together.
    """
    if not folder.is_dir():
        raise CredentialsError(
            f"{folder}: no such folder; kvnode enroll or kvnode pair makes credentials"
        )
    peers = tuple(peer for role in Role for peer in read_pins(folder, role))
    return replace(_load_own(folder), peers=peers)


class CredentialsSource(Protocol):
    """Who gives the credentials of the moment."""

    def current(self, max_age_s: float = 0.0) -> Credentials:
        """The credentials of at most ``max_age_s`` seconds ago."""


class LiveCredentials:
    """The credentials of a folder as they are now, for a process that runs on while they change.

    Looking costs a few ``stat`` calls; files are read only when one of them changed. A change that
    cannot be read never stops the node, and never lets anybody in: a pin that is broken counts as
    no pin, while of its own key and certificate the last good pair stays in use. Both are logged,
    once for each change. Safe to use from several threads (gRPC asks from its own).

    Raises:
        CredentialsError: From the constructor: the folder is not usable to begin with.
    """

    def __init__(self, folder: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._stamp = _stamp(folder)
        self._looked_s = clock_s()
        self._credentials = load_credentials(folder)
        _log_validity(self._credentials)

    def current(self, max_age_s: float = 0.0) -> Credentials:
        """The credentials of at most ``max_age_s`` seconds ago."""
        with self._lock:
            now_s = self._clock_s()
            if now_s - self._looked_s >= max_age_s:
                self._looked_s = now_s
                self._look()
            return self._credentials

    def _look(self) -> None:
        stamp = _stamp(self._folder)
        if stamp == self._stamp:
            return
        # The stamp is older than what is read: a change in between is seen at the next look.
        self._stamp = stamp
        peers = tuple(peer for role in Role for peer in self._sound_pins(role))
        try:
            renewed = _load_own(self._folder)
        except CredentialsError as error:
            log.error("credentials: the last good certificate stays in use: %s", error)
            renewed = self._credentials
        if renewed.name != self._credentials.name:
            log.error("credentials: a certificate of %s, expected %s: not used until a restart",
                      renewed.name, self._credentials.name)  # fmt: skip
            renewed = self._credentials
        self._credentials = replace(renewed, peers=peers)
        log.info("credentials: changed; %d pinned leaves", len(peers))
        _log_validity(self._credentials)

    def _sound_pins(self, role: Role) -> list[PinnedPeer]:
        sound: list[PinnedPeer] = []
        try:
            for path in _pin_files(self._folder, role):
                try:
                    sound.append(_read_pin(path, role))
                except CredentialsError as error:
                    log.error("credentials: not pinned, since its file is broken: %s", error)
        except CredentialsError as error:
            log.error("credentials: nobody is pinned under %s/: %s", role.value, error)
            return []
        return sound


def _load_own(folder: Path) -> Credentials:
    """Key, certificate and authority, without pins."""
    certificate_pem, key_pem = enroll.load_pair(folder)
    certificate = certificates.load_certificate(certificate_pem, enroll.NODE_CERTIFICATE)
    name = certificates.check_name(certificates.common_name(certificate.subject))
    authority_pem = read_public(folder / enroll.AUTHORITY_CERTIFICATE)
    certificates.load_certificate(authority_pem, enroll.AUTHORITY_CERTIFICATE)
    return Credentials(name, certificate_pem, authority_pem, (), key_pem)


def _check_room(same: list[PinnedPeer], peer: PinnedPeer, beside_old: bool) -> None:
    if same and not beside_old:
        raise CredentialsError(
            f"{peer.name}: another leaf of that name exists under {peer.role.value}/; "
            "if the peer renewed its certificate, pin it with --renewed"
        )
    if len(same) >= LEAVES_MAX:
        raise CredentialsError(
            f"{peer.name}: {LEAVES_MAX} leaves are pinned under {peer.role.value}/; unpin one first"
        )


def _pin_files(folder: Path, role: Role) -> list[Path]:
    pins = folder / role.value
    if not pins.exists():
        return []
    make_private_folder(pins)
    found = sorted(pins.glob("*.pem"))
    if len(found) > PINS_MAX:
        raise CredentialsError(f"{pins}: more than {PINS_MAX} pins")
    return found


def _read_pin(path: Path, role: Role) -> PinnedPeer:
    peer = PinnedPeer.of(read_public(path), role)
    if path.stem not in (peer.name, f"{peer.name}.{peer.digest.hex()[:_SHORT]}"):
        raise CredentialsError(f"{path}: pins a certificate of {peer.name}")
    return peer


def _path_of(folder: Path, peer: PinnedPeer) -> Path:
    for path in _pin_files(folder, peer.role):
        if _read_pin(path, peer.role).digest == peer.digest:
            return path
    raise CredentialsError(f"{peer.name}: its pin has gone")


def _stamp(folder: Path) -> tuple[tuple[str | int, ...], ...]:
    """What changes whenever a file of the folder does: names, inodes, times, sizes and modes."""
    own = (enroll.NODE_CERTIFICATE, enroll.NODE_KEY, enroll.NEXT_KEY, enroll.AUTHORITY_CERTIFICATE)
    stamps: list[tuple[str | int, ...]] = []
    for name in (*own, *(role.value for role in Role)):
        with contextlib.suppress(OSError):
            stamps.append(_seen(name, os.lstat(f"{folder}/{name}")))
    for role in Role:
        with contextlib.suppress(OSError), os.scandir(f"{folder}/{role.value}") as entries:
            for entry in itertools.islice(entries, PINS_MAX + 1):
                stamps.append(_seen(entry.path, entry.stat(follow_symlinks=False)))
    return tuple(sorted(stamps, key=lambda stamp: str(stamp[0])))


def _seen(name: str, status: os.stat_result) -> tuple[str | int, ...]:
    times = status.st_mtime_ns, status.st_ctime_ns
    return name, status.st_ino, status.st_size, status.st_mode, *times


def _log_validity(credentials: Credentials) -> None:
    """Say what will fail in handshakes, where gRPC tells nobody why."""
    own = certificates.load_certificate(credentials.certificate_pem, enroll.NODE_CERTIFICATE)
    why = certificates.not_valid_because(own, certificates.utc_now())
    if why is not None:
        log.error("credentials: this certificate is refused by every peer: %s", why)
    for peer in credentials.peers:
        why = peer.why_invalid()
        if why is not None:
            log.warning("credentials: %s is pinned, and refused: %s", peer.name, why)
