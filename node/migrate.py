"""What ``kvnode migrate`` and ``kvnode session`` do: ask a node, show what it says."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvpack.chunk import Codec
from kvpack.compression import Compression, choose_codec
from kvpack.errors import EXIT_GOOD, LimitError
from node.client import NodeClient
from node.config import Address
from node.credentials import Role, load_credentials
from node.dataplane.options import Plane, plane_message
from node.errors import UsageError
from node.follow import FollowingClient
from node.migration.report import as_object
from node.migration.versions import named, read_minors
from node.pb.v1 import session_pb2 as pb
from node.placement.auto import AUTO, auto_target
from node.session import check_session_id

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MigrateOrder:
    """Options of ``kvnode migrate``. ``copy_as`` is empty for a move."""

    session_id: str
    node: str
    target: str
    credentials_dir: Path
    copy_as: str
    accept_compatible: bool
    as_json: bool
    compress: bool = False
    data_plane: Plane | None = None

    def __post_init__(self) -> None:
        _require_session_id(self.session_id)
        if self.copy_as:
            _require_session_id(self.copy_as)


@dataclass(frozen=True, slots=True, repr=False)
class OpenOrder:
    """Options of ``kvnode session open``. ``text`` is the user's."""

    session_id: str
    node: str
    credentials_dir: Path
    text: str | None
    temperature: float
    top_p: float
    seed: int | None


def _require_session_id(text: str) -> None:
    try:
        check_session_id(text)
    except LimitError as error:
        raise UsageError(str(error)) from error


def place(text: str, credentials_dir: Path, other_than: str = "") -> tuple[str, Address]:
    """Read ``[NAME@]HOST:PORT``; a name that is left out must be the only one that is pinned.

    Raises:
        UsageError: No such address, or several nodes could be meant.
        CredentialsError: The folder is not usable.
    """
    name, at, address = text.rpartition("@")
    if at:
        return name, Address.parse(address)
    peers = load_credentials(credentials_dir).peers
    names = sorted({peer.name for peer in peers if peer.role is Role.NODE} - {other_than})
    if len(names) != 1:
        known = ", ".join(names) or "none"
        raise UsageError(f"{text}: say which node, as NAME@HOST:PORT; pinned here: {known}")
    return names[0], Address.parse(address)


def compresses(link_gbits: float | None) -> bool:
    """Whether compression pays on a link of that many Gb/s; None: nobody said, so it does not."""
    bits = None if link_gbits is None else max(1, round(link_gbits * 1e9))
    return choose_codec(Compression.AUTO, bits) is Codec.ZSTD_SPLIT


async def migrate_session(order: MigrateOrder) -> int:
    """Move or copy a session; prints the result.

    Raises:
        KvpackError: It did not come about; the message says where the session is.
    """
    name, address = place(order.node, order.credentials_dir)
    chosen = None
    if order.target != AUTO:
        chosen = place(order.target, order.credentials_dir, name)
    async with FollowingClient(order.credentials_dir, name, address) as following:
        session = await following.find(order.session_id)
        target, target_address = chosen or await auto_target(
            following.client, session, accept_compatible=order.accept_compatible
        )
        if target == following.node:
            raise UsageError(f"session {order.session_id}: lives on node {target} already")
        request = pb.MigrateRequest(
            session_id=order.session_id,
            token=session.token,
            target_node=target,
            target_address=str(target_address),
            accept_compatible=order.accept_compatible,
            copy_as=order.copy_as,
            compress=order.compress,
            data_plane=plane_message(order.data_plane),
        )
        result = await _watch(following.client, request)
    if order.as_json:
        print(json.dumps(as_object(result)))
    else:
        show(result)
    return EXIT_GOOD


async def _watch(client: NodeClient, request: pb.MigrateRequest) -> pb.MigrateResult:
    """Follow a move on a terminal; gives its result."""
    console = Console(stderr=True)
    result = pb.MigrateResult()
    with Progress(
        TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.fields[sent]}"),
        TimeElapsedColumn(), console=console, disable=not console.is_terminal, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("preparing", sent="")
        async for event in client.migrate(request):
            if event.WhichOneof("event") == "result":
                result = event.result
                continue
            now = event.progress
            bar.update(
                task, description=now.step, completed=now.sent_payload_bytes,
                total=max(1, now.total_payload_bytes),
                sent=f"{now.sent_payload_bytes / _MIB:.1f} MiB",
            )  # fmt: skip
    return result


def show(result: pb.MigrateResult) -> None:
    """Print a result as a table."""
    table = Table(title=f"{result.session_id} on {result.target_node}", show_header=False)
    rows = (
        ("rows", f"{result.state_verdict}, {result.position} tokens"),
        ("continuation", _verdict(result)),
        ("full layers", f"{result.nope_bytes / _MIB:.1f} MiB"),
        ("windows", f"{result.swa_bytes / _MIB:.1f} MiB"),
        ("held there already", f"{result.held_bytes / _MIB:.1f} MiB"),
        ("on the wire", f"{result.wire_bytes / _MIB:.1f} MiB"),
        ("hidden", f"{100 * result.hidden_fraction:.1f} %"),
        ("exposed", f"{1000 * result.exposed_handover_s:.0f} ms"),
        ("stream opened again", f"{result.resumed} times"),
        ("data plane", result.data_plane or Plane.MTLS.value),
        *([("instead of", result.plane_fallback)] if result.plane_fallback else []),
    )
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _verdict(result: pb.MigrateResult) -> str:
    if result.continuation_verdict == "exact":
        return "exact"
    return f"{result.continuation_verdict}, drift {result.drift:.3g}"


async def list_sessions(node: str, credentials_dir: Path, as_json: bool) -> int:
    """Print the sessions of a node, one a line, below what the columns are."""
    name, address = place(node, credentials_dir)
    async with NodeClient(credentials_dir, name, address) as client:
        sessions = await client.list_sessions()
        if not as_json:
            print("session\tposition\tnext_index\trevision\tphase")
        for one in sessions:
            values = {
                "session_id": one.session_id,
                "position": one.position,
                "next_index": one.next_index,
                "revision": one.token.revision,
                "phase": pb.SessionPhase.Name(one.phase).removeprefix("SESSION_PHASE_").lower(),
            }
            text = json.dumps(values) if as_json else "\t".join(map(str, values.values()))
            print(text)
    return EXIT_GOOD


async def show_versions(node: str, credentials_dir: Path, as_json: bool) -> int:
    """Print the version of a node, and those of the protocol that it speaks."""
    name, address = place(node, credentials_dir)
    async with NodeClient(credentials_dir, name, address) as client:
        told = await client.describe()
    minors = read_minors(told.protocol)
    values = {
        "node": told.node,
        "version": told.version,
        "protocol_lowest": named(minors.lowest),
        "protocol_highest": named(minors.highest),
    }
    text = json.dumps(values) if as_json else f"{told.node}: kvpack {told.version}, moves {minors}"
    print(text)
    return EXIT_GOOD


async def open_session(order: OpenOrder) -> int:
    """Open a session and prefill its text; prints how far it came."""
    name, address = place(order.node, order.credentials_dir)
    sampling = pb.Sampling(temperature=order.temperature, top_p=order.top_p, seed=order.seed)
    async with NodeClient(order.credentials_dir, name, address) as client:
        token_ids = [] if order.text is None else await client.tokenize(order.text)
        session = await client.open(order.session_id, sampling)
        if token_ids:
            session = await client.append(session, token_ids)
        print(f"{session.session_id} on {name}: {session.next_index} tokens")
    return EXIT_GOOD


async def feed_session(session_id: str, node: str, credentials_dir: Path, text: str) -> int:
    """Append a text to a session and prefill it; prints how far it came."""
    name, address = place(node, credentials_dir)
    async with FollowingClient(credentials_dir, name, address) as following:
        session = await following.find(session_id)
        token_ids = await following.client.tokenize(text)
        session = await following.client.append(session, token_ids)
        print(f"{session.session_id} on {following.node}: {session.next_index} tokens")
    return EXIT_GOOD


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        UsageError: It cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected UTF-8 text, found other bytes") from error
    if not text:
        raise UsageError(f"{path}: empty")
    return text


async def talk(session_id: str, node: str, credentials_dir: Path, tokens: int) -> int:
    """Generate tokens, wherever the session goes meanwhile, and print their text at the end."""
    name, address = place(node, credentials_dir)
    async with FollowingClient(credentials_dir, name, address) as following:
        session = await following.find(session_id)
        if not session.next_index:
            raise UsageError(f"session {session_id}: empty; give it a text: kvnode session feed")
        found: list[int] = []
        shown = ""
        # A hand-over chooses a token that nobody asked for: begin with what nobody was told.
        start = max(1, min(session.told_index, session.next_index))
        async for event in following.generate(session_id, start, tokens):
            found.append(event.token_id)
            text = await following.client.detokenize(found)
            # A character that is not whole yet is shown once it is.
            whole = text.rstrip("\ufffd")
            sys.stdout.write(whole[len(shown) :])
            sys.stdout.flush()
            shown = whole
        sys.stdout.write("\n")
    return EXIT_GOOD


async def save_session(session_id: str, node: str, credentials_dir: Path) -> int:
    """Save a session as a pack on its node; prints the path there."""
    name, address = place(node, credentials_dir)
    async with FollowingClient(credentials_dir, name, address) as following:
        session = await following.find(session_id)
        print((await following.client.save(session)).path)
    return EXIT_GOOD


async def close_session(session_id: str, node: str, credentials_dir: Path) -> int:
    """Give a session up."""
    name, address = place(node, credentials_dir)
    async with FollowingClient(credentials_dir, name, address) as following:
        await following.client.close_session(await following.find(session_id))
    return EXIT_GOOD


async def cancel_move(session_id: str, node: str, credentials_dir: Path) -> int:
    """End a move that is under way."""
    name, address = place(node, credentials_dir)
    async with NodeClient(credentials_dir, name, address) as client:
        await client.cancel_move(await client.get(session_id))
    return EXIT_GOOD
