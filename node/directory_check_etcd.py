"""What ``kvnode directory check`` looks at in an etcd alone: members, keys, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from node.credentials import CredentialsSource
from node.directory_check import CheckFailed
from node.directory_etcd import EtcdDirectory
from node.directory_etcd_keys import Keys, end_of, key_values, read_identity
from node.directory_scratch import NAME, Check, Said, Scratch, stranger_in
from node.errors import DirectoryAmbiguousError, DirectoryError
from node.etcd import Etcd, EtcdLost, EtcdRefused, delete, get, put
from node.etcd_address import EtcdAddress
from node.etcd_cluster import Certificates, EtcdCluster

#: How long a member may need for what another one wrote.
BEHIND_S: Final = 2.0
_STATUS_S: Final = 3.0

#: From here on a member confirms no renewal that its successor does not know (etcd#15247).
VERSION_MIN: Final = (3, 5, 14)


@contextlib.asynccontextmanager
async def beside_etcd(url: str, credentials: CredentialsSource | None) -> AsyncIterator[Scratch]:
    """Keys below the directory's own, which are removed at the end."""
    address = EtcdAddress.parse(url)
    inside = address.inside(f"check-{secrets.token_hex(6)}")
    directory = EtcdDirectory(inside, credentials)
    checks: list[tuple[str, Check]] = [
        ("members", lambda _: _members(directory.cluster, inside.prefix)),
        ("keyspace", lambda _: _keyspace(directory.cluster, Keys(address.prefix))),
    ]
    if not address.plain:
        checks += [
            ("wrong CA", lambda _: _wrong_ca(directory.cluster)),
            ("stranger", lambda _: _stranger(directory.cluster)),
        ]
    try:
        yield Scratch(directory, f"{NAME}-a", f"{NAME}-b", True, checks)
    finally:
        with contextlib.suppress(DirectoryError):
            await directory.cluster.swap(
                (), [delete(f"{inside.prefix}/", end_of(f"{inside.prefix}/"))]
            )
        await directory.close()


async def _members(cluster: EtcdCluster, prefix: str) -> Said:
    """Each answers, knows a leader, is of one etcd, and has what was just written elsewhere."""
    written = await _marked(cluster, f"{prefix}/marker")
    asked = zip(cluster.address.members, cluster.members(), strict=True)
    found = await asyncio.gather(
        *(_member(str(where), member, written.header) for where, member in asked)
    )
    wrong = [what for what, bad in found if bad]
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return "; ".join(what for what, _ in found), {"members": len(found)}


async def _marked(cluster: EtcdCluster, key: str) -> Any:  # noqa: ANN401 - the client's
    for _ in cluster.address.members[1:]:
        # Written twice it is the same; the next one is asked.
        with contextlib.suppress(DirectoryAmbiguousError):
            return await cluster.swap((), [put(key, b"")])
    return await cluster.swap((), [put(key, b"")])


async def _member(where: str, member: Etcd, written: Any) -> tuple[str, bool]:  # noqa: ANN401
    """What there is to say of one member, and whether it is bad."""
    end_s = time.monotonic() + BEHIND_S
    while True:
        try:
            status = await member.status(_STATUS_S)
        except (EtcdLost, EtcdRefused) as error:
            return f"{where}: {error}", True
        if not status.leader:
            return f"{where}: knows no leader", True
        if status.header.cluster_id != written.cluster_id:
            return f"{where}: of another etcd, {status.header.cluster_id:x}", True
        behind = written.revision - status.header.revision
        if behind <= 0:
            return f"{where}: {_version(status.version)}", False
        if time.monotonic() >= end_s:
            return f"{where}: stale, {behind} revisions behind after {BEHIND_S:.0f} s", True
        await asyncio.sleep(0.05)


def _version(version: str) -> str:
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers >= VERSION_MIN:
        return f"etcd {version}"
    floor = ".".join(map(str, VERSION_MIN))
    return f"etcd {version}, older than {floor}: a deposed leader may confirm renewals"


async def _keyspace(cluster: EtcdCluster, keys: Keys) -> Said:
    """What lies below the prefix is a directory's, of this etcd, or nothing."""
    # What other checks wrote is no directory's; "." comes right after "-".
    before = get(keys.all, f"{keys.all}check-", size=1, keys_only=True)
    behind = get(f"{keys.all}check.", end_of(keys.all), size=1, keys_only=True)
    answer = await cluster.look([get(keys.directory), before, behind])
    found, *others = key_values(answer.responses)
    known = read_identity(keys, found)
    if known is None:
        if any(others):
            raise CheckFailed(f"{keys.all}: holds keys, but no directory: another program's?")
        return f"{keys.all}: empty; the first node makes a directory there", {}
    identity, _ = known
    if identity.cluster != answer.header.cluster_id:
        raise CheckFailed(
            f"{keys.all}: made in etcd {identity.cluster:x}, lies in {answer.header.cluster_id:x}: "
            "restored or copied, and not adopted"
        )
    return (
        f"{keys.all}: directory {identity.id.hex()}, generation {identity.generation}, "
        f"revision {answer.header.revision}",
        {"generation": identity.generation, "revision": answer.header.revision},
    )


async def _wrong_ca(cluster: EtcdCluster) -> Said:
    """We refuse a member whose certificate is of an authority that we do not believe."""
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
        other = await asyncio.to_thread(stranger_in, Path(folder))
        believed = (other / "ca-cert.pem").read_bytes()
    own = cluster.certificates()
    await _refused(
        cluster, Certificates(believed, own.cert, own.key), "a member of another authority"
    )
    return "a member of another authority is not believed", {}


async def _stranger(cluster: EtcdCluster) -> Said:
    """The members refuse a certificate that is not of their authority."""
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
        other = await asyncio.to_thread(stranger_in, Path(folder))
        cert, key = ((other / f"node-{part}.pem").read_bytes() for part in ("cert", "key"))
    ca = cluster.certificates().ca
    await _refused(cluster, Certificates(ca, cert, key), "a certificate of another authority")
    await _refused(cluster, Certificates(ca, b"", b""), "somebody without a certificate")
    return "who shows no certificate, or one of another authority, is refused", {}


async def _refused(cluster: EtcdCluster, shown: Certificates, what: str) -> None:
    for number, where in enumerate(cluster.address.members):
        member = cluster.opened(number, shown)
        try:
            await member.txn((), [get("-")], (), _STATUS_S)
        except (EtcdLost, EtcdRefused):
            continue
        finally:
            await member.close()
        raise CheckFailed(f"{where}: {what} was let in")
