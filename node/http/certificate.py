"""The HTTPS certificate as it is now: renewed files are used from the next connection on."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.errors import CredentialsError
from node.files import read_private, read_public

log = logging.getLogger(__name__)

#: Handshakes look at the files this often, in seconds. A look is two calls of ``stat``.
LOOK_S: Final = 1.0


class LiveCertificate:
    """Certificate and key of an HTTPS port, for a node that runs on while they are renewed.

    A pair that cannot be used never stops the node: the last good one stays in use, the log says so
    once for each change, and each look tries again: what failed may have been the process's
    descriptors, not the files. Connections that are open stay as they are. Both files may be links,
    as tools that renew certificates keep them.

    Args:
        certificate: PEM chain.
        key: PEM key, readable by its owner alone.
        clock_s: Seconds on a clock that nobody sets.

    Attributes:
        context: What the port takes; it hands each handshake the present pair.

    Raises:
        CredentialsError: They cannot be used to begin with.
    """

    def __init__(
        self, certificate: Path, key: Path, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._certificate, self._key, self._clock_s = certificate, key, clock_s
        self._stamp = self._told = self._stamped()
        self._looked_s = clock_s()
        self.context = self._present = _context(certificate, key)
        self.context.sni_callback = self._hand_over

    def _hand_over(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext
    ) -> None:
        """Called in every handshake, also where the client names no host."""
        now_s = self._clock_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
        connection.context = self._present

    def _look(self) -> None:
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        try:
            self._present = _context(self._certificate, self._key)
        except (CredentialsError, OSError) as error:
            if stamp != self._told:
                log.error("HTTPS: the last good certificate stays in use: %s", error)
            self._told = stamp
        else:
            # Older than what was read: a change in between is seen at the next look.
            self._stamp = self._told = stamp
            log.info("HTTPS: a renewed certificate is in use")

    def _stamped(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(_stamp(path) for path in (self._certificate, self._key))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes with a file's contents, or with who may read it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size, status.st_mode)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    # Read first: ssl's own errors name no file, and a key that others can read is refused.
    read_public(certificate, follow=True)
    read_private(key, follow=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise CredentialsError(
            f"{certificate}, {key}: no certificate and its key ({error})"
        ) from error
    return context
