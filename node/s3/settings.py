"""Who we are towards S3, and where it is: the standard chain, as every AWS tool reads it.

First the environment; then the files ``~/.aws/credentials`` and ``~/.aws/config`` by the profile;
then what the machine gives (web identity, container, instance), which ``obstore`` asks by itself.
Secrets are handed on and never kept in a message, a log or a ``repr``.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvpack.store.errors import StoreDeniedError, StoreError

#: What gives credentials without a file of ours: ``obstore`` reads these itself.
_MACHINE: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_FILE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a store in S3 is waited for. A call takes at most the sum of the last two.

    Attributes:
        connect_s: For a connection.
        request_s: For one request and its answer, body included.
        retry_s: After this no request is sent again.
        pause_s: Before the first repetition; doubled each time.
    """

    connect_s: float = 5.0
    request_s: float = 60.0
    retry_s: float = 30.0
    pause_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("connect_s", "request_s", "retry_s", "pause_s"):
            value = getattr(self, name)
            if not 0 < value <= 3600:
                raise ValueError(f"{name}: expected 0 to 3600, found {value}")


@dataclass(frozen=True, slots=True, repr=False)
class S3Settings:
    """What a client of S3 is made with.

    Attributes:
        region: Which region signatures are for.
        endpoint: Where the service is; None: that of the region.
        key_id: Access key; None: ``obstore`` asks the machine.
        secret: Its secret.
        token: Of temporary credentials.
        allow_http: Plain HTTP may be spoken.

    Raises:
        StoreError: The endpoint is no http(s) URL, holds an account, or is plain HTTP that leaves
            this machine without having been allowed.
    """

    region: str
    endpoint: str | None = None
    key_id: str | None = None
    secret: str | None = None
    token: str | None = None
    allow_http: bool = False
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if self.endpoint is None:
            return
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise StoreError("S3 endpoint: expected http(s)://HOST:PORT without an account")
        if self.is_plain and not self.allow_http and parts.hostname not in _LOOPBACK:
            raise StoreError(
                f"S3 endpoint {parts.hostname}: plain HTTP; expected https://, or AWS_ALLOW_HTTP=1"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the endpoint is spoken to without TLS."""
        return self.endpoint is not None and self.endpoint.startswith("http://")

    def __repr__(self) -> str:
        return f"S3Settings(region={self.region!r}, endpoint={self.endpoint!r})"


def settings_from(
    environment: Mapping[str, str], home: Path, patience: Patience | None = None
) -> S3Settings:
    """Walk the chain.

    Args:
        environment: Of the process; only names that begin with ``AWS_`` are looked at.
        home: Where ``.aws`` lies.
        patience: How long to wait.

    Raises:
        StoreDeniedError: There are no credentials, or half of them.
        StoreError: A file is unreadable, or the endpoint is no good.
    """
    profile = environment.get("AWS_PROFILE") or "default"
    credentials = _section(
        Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"),
        profile,
    )
    of_config = profile if profile == "default" else f"profile {profile}"
    config = _section(
        Path(environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config"), of_config
    )
    return S3Settings(
        _first(environment, _REGIONS) or config.get("region") or "us-east-1",
        _first(environment, _ENDPOINTS) or config.get("endpoint_url"),
        *_credentials(environment, credentials or config, profile),
        allow_http=environment.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
        patience=patience or Patience(),
    )


def _credentials(
    environment: Mapping[str, str], section: Mapping[str, str], profile: str
) -> tuple[str | None, str | None, str | None]:
    """``(key id, secret, token)``; all None where the machine is to be asked."""
    if environment.get("AWS_ACCESS_KEY_ID"):
        where, found, token = "environment", {
            "key": environment["AWS_ACCESS_KEY_ID"],
            "secret": environment.get("AWS_SECRET_ACCESS_KEY", ""),
        }, environment.get("AWS_SESSION_TOKEN")  # fmt: skip
    elif section.get("aws_access_key_id"):
        where, found, token = f"profile {profile!r}", {
            "key": section["aws_access_key_id"],
            "secret": section.get("aws_secret_access_key", ""),
        }, section.get("aws_session_token")  # fmt: skip
    else:
        _require_machine(environment, profile)
        return None, None, None
    if not found["secret"]:
        raise StoreDeniedError(f"S3 credentials of the {where}: an access key without its secret")
    return found["key"], found["secret"], token or None


def _require_machine(environment: Mapping[str, str], profile: str) -> None:
    """Say at once that there are no credentials, where asking the instance was switched off."""
    if any(environment.get(name) for name in _MACHINE):
        return
    if environment.get("AWS_EC2_METADATA_DISABLED", "").lower() in ("1", "true"):
        raise StoreDeniedError(
            "S3: no credentials: neither AWS_ACCESS_KEY_ID nor a file with profile "
            f"{profile!r} (AWS_PROFILE) gives any"
        )


def _first(environment: Mapping[str, str], wanted: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in wanted if environment.get(name)), None)


def _section(path: Path, name: str) -> Mapping[str, str]:
    """One section of a file of AWS tools; empty where there is none.

    Raises:
        StoreError: The file cannot be read. Its content is not repeated.
    """
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        with path.open(encoding="utf-8") as file:
            parser.read_string(file.read(_FILE_BYTES_MAX))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    except (configparser.Error, UnicodeDecodeError):
        # Without the cause: it repeats the line that it could not read.
        raise StoreError(f"{path}: not a file of AWS profiles") from None
    return dict(parser.items(name)) if parser.has_section(name) else {}
