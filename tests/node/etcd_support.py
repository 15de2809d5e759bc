"""Real etcds for tests: private folders and ports, certificates of the tests' own authority."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from directory_support import FakeClock

from node import enroll
from node.directory_etcd import EtcdDirectory
from node.etcd_address import EtcdAddress
from node.trust import LiveCredentials

START_S = 60.0

#: What an etcd's lease is at the least here: whole seconds, and longer than an election.
TTL_S = 1.0


def require_etcd() -> str:
    """The program; the test is skipped where there is none."""
    found = shutil.which("etcd")
    if found is None:
        pytest.skip("no etcd on this machine: apt-get install etcd-server, as .ci/run does")
    return found


def make_certificate(authority: Path, folder: Path) -> Path:
    """A server certificate for ``etcd``, ``localhost`` and 127.0.0.1: ``cert.pem``, ``key.pem``."""
    signer = serialization.load_pem_private_key(
        (authority / enroll.AUTHORITY_KEY).read_bytes(), None
    )
    issuer = x509.load_pem_x509_certificate((authority / enroll.AUTHORITY_CERTIFICATE).read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("etcd"), x509.DNSName("localhost")]
    names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "key.pem").chmod(0o600)
    return folder


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Member:
    """One etcd process, started again on the same ports and data as often as it ends."""

    def __init__(self, number: int, root: Path, client: int, peer: int, tls: Path | None):
        self.name = f"m{number}"
        self.root = root
        self.client = client
        self.peer = peer
        self.tls = tls
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, members: list[Member], demands: bool = True) -> None:
        scheme = "http" if self.tls is None else "https"
        peers = ",".join(f"{one.name}={scheme}://127.0.0.1:{one.peer}" for one in members)
        mine, between = f"{scheme}://127.0.0.1:{self.client}", f"{scheme}://127.0.0.1:{self.peer}"
        arguments = [
            require_etcd(), "--name", self.name, "--data-dir", str(self.root / self.name),
            "--listen-client-urls", mine, "--advertise-client-urls", mine,
            "--listen-peer-urls", between, "--initial-advertise-peer-urls", between,
            "--initial-cluster", peers, "--initial-cluster-token", self.root.name,
            "--heartbeat-interval", "20", "--election-timeout", "300",
        ]  # fmt: skip
        if self.tls is not None:
            for kind in ("", "peer-"):
                arguments += [
                    f"--{kind}cert-file", str(self.tls / "cert.pem"),
                    f"--{kind}key-file", str(self.tls / "key.pem"),
                ]  # fmt: skip
                if demands or kind:
                    arguments += [f"--{kind}trusted-ca-file", str(self.tls / "ca.pem")]
                    arguments.append(f"--{kind}client-cert-auth")
        with (self.root / f"{self.name}.log").open("ab") as log:
            # A session of its own: whatever ends the tests by a signal leaves it to us.
            self.process = subprocess.Popen(
                arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
            )

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


class Etcds:
    """The members of one etcd.

    Args:
        root: For their data.
        count: How many.
        authority: A folder of an authority, whose certificates they show and demand; None: none.
    """

    def __init__(self, root: Path, count: int = 1, authority: Path | None = None):
        self.root = root
        self.tls = None
        self.demands_certificates = True
        if authority is not None:
            self.tls = make_certificate(authority, root / "tls")
            ca = (authority / enroll.AUTHORITY_CERTIFICATE).read_bytes()
            (self.tls / "ca.pem").write_bytes(ca)
        ports = free_ports(2 * count)
        self.members = [
            Member(number, root, ports[2 * number], ports[2 * number + 1], self.tls)
            for number in range(count)
        ]

    def __enter__(self):
        for member in self.members:
            member.start(self.members, self.demands_certificates)
        try:
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for member in self.members:
            if member.process is not None:
                member.process.kill()
                member.process.wait(10)

    def wait(self) -> None:
        """Until every member answers with a leader."""
        for member in self.members:
            end_s = time.monotonic() + START_S
            while not self.healthy(member):
                assert time.monotonic() < end_s, (self.root / f"{member.name}.log").read_text()[
                    -2000:
                ]
                assert member.process.poll() is None, (self.root / f"{member.name}.log").read_text()
                time.sleep(0.05)

    def healthy(self, member: Member) -> bool:
        return self.status(member) is not None

    def status(self, member: Member):
        """What one member says of itself; None where it says nothing."""

        async def ask():
            from node.etcd import EtcdLost
            from node.etcd_cluster import EtcdCluster

            address = EtcdAddress.parse(self.url(members=[member]))
            cluster = EtcdCluster(address)
            try:
                found = await cluster.members()[0].status(1.0)
                return found if found.leader else None
            except EtcdLost:
                return None
            finally:
                await cluster.close()

        return asyncio.run(ask())

    def leader(self) -> Member:
        """Whoever leads now."""
        for member in self.members:
            if member.process.poll() is None:
                status = self.status(member)
                if status is not None and status.leader == status.header.member_id:
                    return member
        raise AssertionError("no leader")

    def url(self, prefix: str = "kvpack", members=None, **more: str) -> str:
        """With the members' own certificate as a client's."""
        where = ",".join(f"127.0.0.1:{one.client}" for one in members or self.members)
        files = (
            {name: str(self.tls / f"{name}.pem") for name in ("ca", "cert", "key")}
            if self.tls
            else {}
        )
        query = {"prefix": prefix, **(files or {"tls": "off"}), **more}
        return f"etcd://{where}?" + "&".join(f"{name}={value}" for name, value in query.items())

    @contextlib.contextmanager
    def frozen(self):
        """All members stand still: nobody hangs up, and nobody answers."""
        for member in self.members:
            member.send(signal.SIGSTOP)
            # Its threads go on for a moment; this returns when all of them stand.
            os.waitpid(member.process.pid, os.WUNTRACED)
        try:
            yield
        finally:
            for member in self.members:
                member.send(signal.SIGCONT)


class TooSlow(Exception):
    """A lease was over before the test could look at it."""


class EtcdPlace:
    """A directory in an etcd, as :class:`directory_support.Place` is one in a file."""

    #: A tenth of a file's: there a clock is moved, here time goes by.
    ttl_s = TTL_S
    default_lease = "node.directory_etcd_leases.LEASE_S"

    def __init__(self, etcds: Etcds, parties: Path, prefix: str):
        self.etcds = etcds
        self.parties = parties
        self.prefix = prefix
        self.clock = FakeClock()

    def directory(self, name: str = "a") -> EtcdDirectory:
        where = ",".join(f"127.0.0.1:{one.client}" for one in self.etcds.members)
        address = EtcdAddress.parse(f"etcd://{where}?prefix={self.prefix}")
        return EtcdDirectory(address, LiveCredentials(self.parties / name))

    @contextlib.asynccontextmanager
    async def opened(self):
        """The directory, for all of its nodes."""
        directory = self.directory()
        try:
            yield directory
        finally:
            await directory.close()

    def run(self, work, seconds: float = 60.0):
        """Run ``work(directory)`` with a bound on its time."""

        async def bounded():
            async with asyncio.timeout(seconds), self.opened() as directory:
                return await work(directory)

        for _ in range(5):
            with contextlib.suppress(TooSlow):
                return asyncio.run(bounded())
            self.prefix += "-again"
        raise AssertionError(f"five times no {self.ttl_s} s to look at a lease")

    def begun(self):
        """A lease is asked for now: what is to be so while it runs is looked at in what this gives.

        A machine that took as long as the lease lasts says nothing of it: then all begins again.
        """
        begun_s = time.monotonic()

        @contextlib.contextmanager
        def running():
            try:
                yield
            except asyncio.CancelledError:
                raise
            except BaseException:
                if time.monotonic() - begun_s < self.ttl_s:
                    raise
                raise TooSlow from None

        return running

    async def part(self, share: float) -> None:
        """Let a part of a lease go by."""
        await asyncio.sleep(share * self.ttl_s)

    async def outlast(self, directory, node: str) -> None:
        """Let a lease that runs end."""
        async with asyncio.timeout(10 * self.ttl_s):
            while (await directory.lease(node)).left_s:
                await asyncio.sleep(0.05)
