"""What the web door is told: where it listens, who may come in, how long it waits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.config import Address
from node.errors import UsageError

#: How long running answers may go on once the node was told to stop, by default.
DRAIN_S: Final = 30.0

_DRAIN_S_MAX: Final = 3600.0


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Options of ``kvnode serve`` for its HTTP port.

    Attributes:
        address: Where to listen.
        api_key_file: Who may call; None: whoever reaches the port, which must be a loopback one.
        tls_certificate: PEM chain; None: no TLS.
        tls_key: PEM key of it.
        allowed_origins: Web pages of these origins may call; ``*`` is every page there is.
        drain_s: How long running answers may go on once the node was told to stop.
        calls_per_tenant: Calls of one tenant that may be under way; None: as many as of all.
        tokens_per_minute: Tokens that a tenant may have computed; None: as many as it gets.

    Raises:
        UsageError: A combination that would let strangers in, or a number outside its range.
    """

    address: Address
    api_key_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    drain_s: float = DRAIN_S
    calls_per_tenant: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key: expected both or neither")
        if not 0 <= self.drain_s <= _DRAIN_S_MAX:
            raise UsageError(f"--drain {self.drain_s}: expected 0 to {_DRAIN_S_MAX:.0f} seconds")
        for given in (self.calls_per_tenant, self.tokens_per_minute):
            if given is not None and given < 1:
                raise UsageError("quotas: expected 1 or more")
        if self.is_loopback:
            return
        if self.tls_certificate is None or self.api_key_file is None:
            raise UsageError(
                f"--host {self.address.host}: other machines could reach it, so it needs "
                "--tls-cert, --tls-key and --api-key-file"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine reaches the address."""
        return is_loopback(self.address.host)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine alone. A name other than ``localhost`` may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
