"""``kvnode directory``: what a directory says, and the two things that only a person may decide."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from node.errors import UsageError

if TYPE_CHECKING:
    from node.directory import Directory, DirectoryState, NodeLease, OwnershipToken, Record

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)

_DIRECTORY: Final = click.option(
    "--directory",
    "url",
    required=True,
    metavar="URL",
    help="sqlite:PATH, grpc://NODE@HOST:PORT or etcd://HOST,HOST,…",
)
_CREDENTIALS: Final = click.option(
    "--credentials", type=_FOLDER, help="Folder made by enroll; for grpc:, and etcd: without files."
)
_JSON: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead."
)

#: How long a command may wait for a directory in all, in seconds.
COMMAND_S: Final = 30.0


@click.group()
def directory() -> None:
    """Who owns what: look, adopt after a restore, take over from a node that is gone."""


@directory.command()
@_DIRECTORY
@_CREDENTIALS
@click.option("--session", "sessions", multiple=True, help="Say who owns it; may be repeated.")
@click.option("--node", "nodes", multiple=True, help="Say what it owns; may be repeated.")
@_JSON
def show(
    url: str,
    credentials: Path | None,
    sessions: tuple[str, ...],
    nodes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show how far a directory has come, and what it says of sessions and nodes."""
    from node.session import check_session_id

    for session_id in sessions:
        check_session_id(session_id)

    async def work(opened: Directory) -> dict[str, Any]:
        return {
            **_state(await opened.state()),
            "sessions": [_session(i, await opened.owner(i)) for i in sessions],
            "nodes": [
                _node(name, await opened.lease(name), len(await opened.owned_by(name)))
                for name in nodes
            ],
        }

    found = _run(url, credentials, work)
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


@directory.command()
@_DIRECTORY
@_CREDENTIALS
@click.option(
    "--seen",
    "data_dirs",
    type=_FOLDER,
    multiple=True,
    help="Data folder of a node: rise above what it has seen; may be repeated.",
)
@click.option(
    "--above",
    default=0,
    type=click.IntRange(0, 1 << 62),
    metavar="GENERATION",
    help="Rise above this one.",
)
@_JSON
def adopt(
    url: str,
    credentials: Path | None,
    data_dirs: tuple[Path, ...],
    above: int,
    as_json: bool,
) -> None:
    """Make every ownership token that was given out so far stale.

    To be done once after a directory was restored from a backup, copied, or moved to another
    machine or etcd; with a file: where it is. Nodes that run go on with what they hold, under new
    tokens. A node that has seen a higher generation refuses the directory: name its data folder
    with --seen.
    """
    from node.directory import Adoptable

    async def work(opened: Directory) -> dict[str, Any]:
        if not isinstance(opened, Adoptable):
            raise UsageError(f"directory {url!r}: adopt it where its file is, as sqlite:PATH")
        state = await opened.state()
        highest = [await _seen_generation(folder, state.directory_id) for folder in data_dirs]
        return _state(await opened.adopt(max(above, *highest, 0)))

    found = _run(url, credentials, work)
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


@directory.command()
@click.argument("url")
@_CREDENTIALS
@_JSON
def check(url: str, credentials: Path | None, as_json: bool) -> None:
    """Try whether a directory keeps what nodes rely on.

    Contenders, fencing, lost replies, watch, lease; of an etcd also its members, keys and
    certificates. Writes beside what is there and removes it again. Exits with 1 if anything did
    not hold.
    """
    from node.credentials import LiveCredentials
    from node.directory_check import Finding, findings
    from node.directory_scratch import scratch_of

    async def work() -> list[Finding]:
        live = None if credentials is None else LiveCredentials(credentials)
        found = []
        async with scratch_of(url, live) as scratch:
            async for one in findings(scratch):
                found.append(one)
                if not as_json:
                    click.echo(f"{one.check}: {'ok' if one.ok else 'FAILED'}: {one.said}")
        return found

    found = asyncio.run(work())
    good = all(one.ok for one in found)
    if as_json:
        lines = [asdict(one) for one in found]
        click.echo(json.dumps({"directory": url, "ok": good, "checks": lines}))
    if not good:
        raise SystemExit(1)


@directory.command()
@click.argument("session")
@_DIRECTORY
@_CREDENTIALS
@click.option("--node", "name", help="The new owner; with grpc: it is whose credentials these are.")
@_JSON
def takeover(
    session: str, url: str, credentials: Path | None, name: str | None, as_json: bool
) -> None:
    """Make another node the owner of a session whose owner is gone.

    Refused while the owner's lease runs. The new owner serves what it has on disk of the session
    once it is restarted; where it has nothing, its id can be opened there anew.
    """
    from node.session import check_session_id

    check_session_id(session)

    async def work(opened: Directory) -> dict[str, Any]:
        node = name or _own_name(credentials)
        return {"session": session, "node": node, **_token(await _take(opened, session, node))}

    found = _run(url, credentials, work)
    line = "session {session}: owned by node {node}, generation {generation}, revision {revision}"
    click.echo(json.dumps(found) if as_json else line.format(**found))


async def _take(opened: Directory, session_id: str, node: str) -> OwnershipToken:
    import secrets

    from kvpack import limits
    from node.directory import NONCE_BYTES, Ownership
    from node.errors import SessionNotFoundError

    limits.check_name("node", node)
    record = await opened.owner(session_id)
    if not isinstance(record, Ownership):
        raise SessionNotFoundError(f"session {session_id}: nobody owns it; it can be opened anew")
    if record.node == node:
        raise UsageError(f"session {session_id}: node {node} owns it already")
    nonce = secrets.token_bytes(NONCE_BYTES)
    return await opened.takeover(session_id, record.token, node, nonce)


def _own_name(credentials: Path | None) -> str:
    if credentials is None:
        raise UsageError("takeover: expected --node, or --credentials of the new owner")
    from node.credentials import load_credentials

    return load_credentials(credentials).name


async def _seen_generation(data_dir: Path, directory_id: bytes) -> int:
    from node.directory_member import SEEN
    from node.directory_seen import Seen

    if not (data_dir / SEEN).is_file():
        raise UsageError(f"{data_dir}: no {SEEN} in it; expected the data folder of a node")
    seen = Seen(data_dir / SEEN)
    try:
        return seen.highest(directory_id)[0]
    finally:
        await seen.close()


def _run(
    url: str,
    credentials: Path | None,
    work: Callable[[Directory], Awaitable[dict[str, Any]]],
) -> dict[str, Any]:
    """Open the directory, do ``work``, close it; all within :data:`COMMAND_S`."""
    from node.credentials import LiveCredentials
    from node.directory import open_directory
    from node.errors import DirectoryError

    async def bounded() -> dict[str, Any]:
        live = None if credentials is None else LiveCredentials(credentials)
        _require_file(url)
        opened = open_directory(url, live)
        try:
            async with asyncio.timeout(COMMAND_S):
                return await work(opened)
        except TimeoutError:
            raise DirectoryError(f"directory {url!r}: no answer in {COMMAND_S:.0f} s") from None
        finally:
            await opened.close()

    return asyncio.run(bounded())


def _require_file(url: str) -> None:
    """A mistyped path must not make a new directory: looking at it would find nothing in it."""
    scheme, _, path = url.partition(":")
    if scheme == "sqlite" and path and not Path(path).exists():
        raise UsageError(f"directory {url!r}: there is no such file")


def _state(state: DirectoryState) -> dict[str, Any]:
    return {
        "directory_id": state.directory_id.hex(),
        "generation": state.generation,
        "revision": state.revision,
    }


def _token(token: OwnershipToken) -> dict[str, Any]:
    return {"generation": token.generation, "revision": token.revision}


def _session(session_id: str, record: Record | None) -> dict[str, Any]:
    from node.directory import Ownership

    if record is None:
        return {"session": session_id, "is": "unknown"}
    if isinstance(record, Ownership):
        owned = {"session": session_id, "is": "owned", "node": record.node}
        return {**owned, **_token(record.token)}
    released = {"session": session_id, "is": "released", "node": record.last_node}
    return {**released, **_token(record.token), "released_revision": record.released_revision}


def _node(name: str, lease: NodeLease | None, owned: int) -> dict[str, Any]:
    left_s = None if lease is None else round(lease.left_s, 3)
    return {"node": name, "lease_left_s": left_s, "owned_sessions": owned}


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"directory {found['directory_id']}: "
        f"generation {found['generation']}, revision {found['revision']}"
    ]
    for one in found.get("sessions", ()):
        if one["is"] == "unknown":
            lines.append(f"session {one['session']}: unknown to this directory")
        else:
            by = "by node {node}, generation {generation}, revision {revision}".format(**one)
            lines.append(f"session {one['session']}: {one['is']} {by}")
    for one in found.get("nodes", ()):
        left = one["lease_left_s"]
        lease = "no lease" if left is None else "lease over" if not left else f"lease {left} s"
        lines.append(f"node {one['node']}: {lease}, {one['owned_sessions']} sessions")
    return lines
