"""``kvnode migrate`` and ``kvnode session``: what a person does with sessions over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import click

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_FILE: Final = click.Path(path_type=Path)

_NODE: Final = click.option(
    "--node",
    required=True,
    metavar="[NAME@]HOST:PORT",
    envvar="KVNODE_NODE",
    show_envvar=True,
    help="The node to ask.",
)
_CREDENTIALS: Final = click.option(
    "--credentials",
    required=True,
    type=_FOLDER,
    envvar="KVNODE_CREDENTIALS",
    show_envvar=True,
    help="A client's folder made by enroll or pair.",
)
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")


def _run(work: Coroutine[Any, Any, int]) -> None:
    raise SystemExit(asyncio.run(work))


@click.command()
@click.argument("session")
@click.option(
    "--to",
    "targets",
    required=True,
    multiple=True,
    metavar="[NAME@]HOST:PORT|auto|store:PATH",
    help="Where to; auto: to the node with the most free KV memory where it goes on exactly. With "
    "--mode copy several times, for a copy on each. store:PATH is a folder on "
    "the node's machine, or store:s3://BUCKET/PREFIX, below one that it was started with "
    "(--store-root).",
)
@_NODE
@_CREDENTIALS
@click.option("--mode", type=click.Choice(["move", "copy"]), default="move", show_default=True)
@click.option(
    "--as",
    "copy_as",
    metavar="ID",
    help="Name of the copy, of several ID-1, ID-2, ...; default: SESSION-copy.",
)
@click.option(
    "--accept",
    type=click.Choice(["compatible"]),
    help="Consent to a continuation that is not bit-exact: the other node computes otherwise.",
)
@click.option(
    "--link-gbits",
    type=click.FloatRange(0.001, 1_000_000),
    help="What the link carries, in Gb/s: rows are compressed where that pays; else they are not.",
)
@click.option(
    "--data-plane",
    type=click.Choice(["mtls", "grpc-plain", "socket"]),
    help="Where the sealed chunks travel; default: as the node was set up (--data-plane-to), else "
    "mtls. A target that does not offer the plane gets them over mtls.",
)
@_JSON
def migrate(
    session: str,
    targets: tuple[str, ...],
    node: str,
    credentials: Path,
    mode: str,
    copy_as: str | None,
    accept: str | None,
    link_gbits: float | None,
    data_plane: str | None,
    as_json: bool,
) -> None:
    """Move or copy SESSION from one node to another while it is in use.

    The whole state goes: tokens, keys and values, sampler and text. Whoever streams from the
    session meanwhile gets each token once. Prints what was measured; exits with 0 only if the
    target owns what it got, and with its verdicts. Several targets are sent one session at once;
    then a result is printed for each.

    \b
    Example:
      kvnode migrate chat-1 --node mac@127.0.0.1:7411 --to box@127.0.0.1:7412 \\
          --credentials client-credentials
      kvnode migrate chat-1 --node mac@127.0.0.1:7411 --to store:/srv/sessions/team \\
          --credentials client-credentials
    """
    from node.dataplane.options import Plane
    from node.errors import UsageError
    from node.migrate import MigrateOrder, compresses, migrate_session

    plane = None if data_plane is None else Plane(data_plane)
    if any(target.startswith("store:") for target in targets):
        from node.migrate_store import StoreOrder, park_session

        if len(targets) > 1 or copy_as is not None:
            raise UsageError("--to store:PATH: one at a time, and a copy there has no name")
        if plane is not None:
            raise UsageError("--data-plane: to a store nothing travels between nodes")
        store = StoreOrder(session, node, targets[0], credentials, as_json)
        _run(park_session(store, copy=mode == "copy"))
        return
    if copy_as is not None and mode != "copy":
        raise UsageError("--as: only with --mode copy")
    name = (copy_as or f"{session}-copy") if mode == "copy" else ""
    accepted = accept is not None
    if len(targets) > 1:
        from node.migrate_several import CopiesOrder, copy_to_several

        if mode != "copy":
            raise UsageError("--to: one target, except with --mode copy")
        copies = CopiesOrder(
            session, node, targets, credentials, name, accepted, as_json, compresses(link_gbits),
            plane,
        )  # fmt: skip
        _run(copy_to_several(copies))
        return
    compress = compresses(link_gbits)
    order = MigrateOrder(
        session, node, targets[0], credentials, name, accepted, as_json, compress, plane
    )
    _run(migrate_session(order))


@click.group()
def session() -> None:
    """Sessions of a node: open, feed, let talk, save, close."""


@session.command("list")
@_NODE
@_CREDENTIALS
@_JSON
def list_command(node: str, credentials: Path, as_json: bool) -> None:
    """List the sessions that live on the node."""
    from node.migrate import list_sessions

    _run(list_sessions(node, credentials, as_json))


@session.command()
@_NODE
@_CREDENTIALS
@_JSON
def versions(node: str, credentials: Path, as_json: bool) -> None:
    """Print the node's version, and which versions of the protocol it moves sessions by.

    Two nodes move sessions to one another if their ranges meet.
    """
    from node.migrate import show_versions

    _run(show_versions(node, credentials, as_json))


@session.command("open")
@click.argument("session_id", metavar="SESSION")
@_NODE
@_CREDENTIALS
@click.option("--text", type=_FILE, help="A text to begin with: a UTF-8 file.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Default: unpredictable.")
def open_command(
    session_id: str,
    node: str,
    credentials: Path,
    text: Path | None,
    temperature: float,
    top_p: float,
    seed: int | None,
) -> None:
    """Open SESSION on the node, and prefill a text."""
    from node.migrate import OpenOrder, open_session, read_text

    content = None if text is None else read_text(text)
    order = OpenOrder(session_id, node, credentials, content, temperature, top_p, seed)
    _run(open_session(order))


@session.command()
@click.argument("session_id", metavar="SESSION")
@_NODE
@_CREDENTIALS
@click.option("--text", type=_FILE, required=True, help="A UTF-8 file.")
def feed(session_id: str, node: str, credentials: Path, text: Path) -> None:
    """Append a text to SESSION and prefill it."""
    from node.migrate import feed_session, read_text

    _run(feed_session(session_id, node, credentials, read_text(text)))


@session.command()
@click.argument("session_id", metavar="SESSION")
@_NODE
@_CREDENTIALS
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=64, show_default=True)
def generate(session_id: str, node: str, credentials: Path, tokens: int) -> None:
    """Let SESSION go on and print its text; follows the session where it moves."""
    from node.migrate import talk

    _run(talk(session_id, node, credentials, tokens))


@session.command()
@click.argument("session_id", metavar="SESSION")
@_NODE
@_CREDENTIALS
def save(session_id: str, node: str, credentials: Path) -> None:
    """Write SESSION as a .kvpack into the node's data folder; prints its path there."""
    from node.migrate import save_session

    _run(save_session(session_id, node, credentials))


@session.command()
@click.argument("session_id", metavar="SESSION")
@_NODE
@_CREDENTIALS
def close(session_id: str, node: str, credentials: Path) -> None:
    """Give SESSION up."""
    from node.migrate import close_session

    _run(close_session(session_id, node, credentials))


@session.command("cancel-move")
@click.argument("session_id", metavar="SESSION")
@_NODE
@_CREDENTIALS
def cancel_command(session_id: str, node: str, credentials: Path) -> None:
    """End a move of SESSION that is under way; it goes on where it is.

    Closing the terminal of kvnode migrate does not end a move. From the moment of the hand-over
    it cannot be ended: the directory then decides who owns the session.
    """
    from node.migrate import cancel_move

    _run(cancel_move(session_id, node, credentials))


@session.command()
@click.argument("session_id", metavar="SESSION")
@_NODE
@_CREDENTIALS
@click.option("--from", "store", required=True, metavar="store:PATH", help="Where it lies.")
@click.option("--as", "restore_as", metavar="ID", help="A copy of this name; the rest stays there.")
@click.option(
    "--accept",
    type=click.Choice(["compatible"]),
    help="Consent to a continuation that is not bit-exact: the node computes otherwise.",
)
@_JSON
def restore(
    session_id: str,
    node: str,
    credentials: Path,
    store: str,
    restore_as: str | None,
    accept: str | None,
    as_json: bool,
) -> None:
    """Bring SESSION out of a store to the node.

    The whole session was put there by kvnode migrate --to store:PATH. Every chunk is checked and
    its content id computed anew; of two nodes that ask at once one gets it. PATH is the folder as
    the node's machine calls it, or s3://BUCKET/PREFIX, below one that it was started with
    (--store-root).

    \b
    Example:
      kvnode session restore chat-1 --node box@127.0.0.1:7412 --from store:/srv/sessions/team \\
          --credentials client-credentials
    """
    from node.migrate_store import StoreOrder, restore_session

    order = StoreOrder(session_id, node, store, credentials, as_json)
    _run(restore_session(order, restore_as or "", accept_compatible=accept is not None))
