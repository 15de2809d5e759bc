"""``kvnode drain`` and ``kvnode rebalance``: their options, and what they print."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvpack.errors import EXIT_FAILURE, EXIT_GOOD

if TYPE_CHECKING:
    from node.placement.drain import Drained, Progress
    from node.placement.rebalance import Rebalanced

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_MIB: Final = 1 << 20

_CREDENTIALS: Final = click.option(
    "--credentials", required=True, type=_FOLDER, envvar="KVNODE_CREDENTIALS",
    help="A client's folder made by enroll or pair; default: $KVNODE_CREDENTIALS.",
)  # fmt: skip
_ACCEPT: Final = click.option(
    "--accept", type=click.Choice(["compatible"]),
    help="Consent to continuations that are not bit-exact: some other node computes otherwise.",
)  # fmt: skip
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command()
@click.argument("node", metavar="[NAME@]HOST:PORT", envvar="KVNODE_NODE")
@_CREDENTIALS
@_ACCEPT
@click.option("--parallel", default=3, show_default=True, type=click.IntRange(1, 16))
@click.option(
    "--timeout", "timeout_s", default=3600.0, show_default=True, metavar="SECONDS",
    type=click.FloatRange(1.0, 86_400.0), help="No move is begun after that.",
)  # fmt: skip
@click.option(
    "--link-gbits", type=click.FloatRange(0.001, 1_000_000),
    help="What the link carries, in Gb/s: rows are compressed where that pays; else they are not.",
)  # fmt: skip
@click.option("--undo", is_flag=True, help="Let the node take sessions again, and move none.")
@_JSON
def drain(
    node: str,
    credentials: Path,
    accept: str | None,
    parallel: int,
    timeout_s: float,
    link_gbits: float | None,
    undo: bool,
    as_json: bool,
) -> None:
    """Move every session off a node, to nodes that it has pinned.

    The node opens no session from then on, and none is placed there, until it is started again or
    --undo. Each session goes where it goes on exactly, to the node with the most free KV memory;
    what no node can take stays and is named. Killed and run again, it goes on.

    Exits with 0 if the node has nothing left, with 1 if something stays or it does not answer.

    \b
    Example:
      kvnode drain mac@127.0.0.1:7411 --credentials client-credentials
    """
    from node.migrate import compresses, place
    from node.placement.drain import DrainOrder, drain_node

    name, address = place(node, credentials)
    if undo:
        asyncio.run(_undo(name, address, credentials))
        click.echo(f"node {name}: takes sessions again")
        return
    order = DrainOrder(
        name, address, credentials, accept is not None, compresses(link_gbits), parallel, timeout_s
    )
    with _bar() as show:
        done = asyncio.run(drain_node(order, show))
    if as_json:
        click.echo(json.dumps(_drained(name, done)))
    else:
        for line in _drained_lines(name, done):
            click.echo(line)
    raise SystemExit(EXIT_GOOD if done.is_empty else EXIT_FAILURE)


@click.command()
@click.option(
    "--node", required=True, metavar="[NAME@]HOST:PORT", envvar="KVNODE_NODE",
    help="The node to ask which others there are; default: $KVNODE_NODE.",
)  # fmt: skip
@_CREDENTIALS
@_ACCEPT
@click.option("--dry-run", is_flag=True, help="Only print what would move.")
@click.option("--max-moves", default=32, show_default=True, type=click.IntRange(1, 256))
@_JSON
def rebalance(
    node: str,
    credentials: Path,
    accept: str | None,
    dry_run: bool,
    max_moves: int,
    as_json: bool,
) -> None:
    """Move a few sessions so that nodes are about equally full.

    By free KV memory, between nodes of one model that compute alike, from the fullest to the least
    full one, while they differ by more than 5 %. Run again it moves nothing.

    \b
    Example:
      kvnode rebalance --node mac@127.0.0.1:7411 --credentials client-credentials --dry-run
    """
    from node.migrate import place
    from node.placement.rebalance import RebalanceOrder
    from node.placement.rebalance import rebalance as work

    name, address = place(node, credentials)
    order = RebalanceOrder(name, address, credentials, accept is not None, dry_run, max_moves)
    done = asyncio.run(work(order, lambda step: None))
    if as_json:
        click.echo(json.dumps(_rebalanced(done, dry_run)))
    else:
        for line in _rebalanced_lines(done, dry_run):
            click.echo(line)
    raise SystemExit(EXIT_FAILURE if done.failed else EXIT_GOOD)


async def _undo(name: str, address: Any, credentials: Path) -> None:  # noqa: ANN401 - an Address
    from node.client import NodeClient

    async with NodeClient(credentials, name, address) as client:
        await client.leave(stay=True)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A bar of bytes on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[sent]}"),
        TimeElapsedColumn(), console=console, disable=not console.is_terminal, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("draining", sent="")

        def show(progress: Progress) -> None:
            done, total = progress.moved_bytes / _MIB, progress.total_bytes / _MIB
            bar.update(
                task, completed=progress.moved_bytes, total=max(1, progress.total_bytes),
                description=", ".join(sorted(progress.sent)[:3]) or "draining",
                sent=f"{done:.1f} of {total:.1f} MiB",
            )  # fmt: skip

        yield show


def _drained(node: str, done: Drained) -> dict[str, Any]:
    from node.migration.report import as_object

    return {
        "node": node,
        "empty": done.is_empty,
        "moved": [as_object(one) for one in done.moved],
        "gone": sorted(done.gone),
        "stayed": [{"session_id": name, "why": why} for name, why in sorted(done.stayed.items())],
        "other_tenants_sessions": done.other_tenants,
        "seconds": round(done.seconds, 3),
    }


def _drained_lines(node: str, done: Drained) -> Iterator[str]:
    for one in sorted(done.moved, key=lambda one: one.session_id):
        exposed_ms = 1000 * one.exposed_handover_s
        yield (
            f"{one.session_id} on {one.target_node}: {one.continuation_verdict}, "
            f"{one.payload_bytes / _MIB:.1f} MiB, {exposed_ms:.0f} ms without an owner"
        )
    for name in sorted(done.gone):
        yield f"{name}: gone meanwhile"
    for name in sorted(done.stayed):
        yield f"{name} stays: {done.stayed[name]}"
    if done.other_tenants:
        yield f"{done.other_tenants} sessions of other tenants stay: they do not move"
    moved = f"{len(done.moved)} sessions moved in {done.seconds:.1f} s"
    yield f"node {node}: {moved}, {len(done.stayed) + done.other_tenants} left"


def _rebalanced(done: Rebalanced, dry_run: bool) -> dict[str, Any]:
    from node.migration.report import as_object

    return {
        "dry_run": dry_run,
        "plan": [
            {
                "session_id": step.session.session_id, "source": step.source,
                "target": step.target, "row_bytes": step.session.row_bytes,
                "continuation": step.continuation.value,
            }
            for step in done.plan.steps
        ],
        "moved": [as_object(one) for one in done.moved],
        "failed": done.failed,
        "left_out": done.left_out,
    }  # fmt: skip


def _rebalanced_lines(done: Rebalanced, dry_run: bool) -> Iterator[str]:
    for name, why in sorted(done.left_out.items()):
        yield f"node {name} takes no part: {why}"
    verb = "would go" if dry_run else "goes"
    for step in done.plan.steps:
        size = step.session.row_bytes / _MIB
        failed = done.failed.get(step.session.session_id)
        end = f"stays: {failed}" if failed else f"{verb} to {step.target}, {size:.1f} MiB"
        yield f"{step.session.session_id} of {step.source} {end}"
    if not done.plan.steps:
        yield "nothing to move: the nodes are about equally full"
