"""``kvnode bench``: measure a move between two processes or two machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from node.config import Address
from node.errors import UsageError

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_ROWS: Final = click.option(
    "--rows",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Rows that a model computed, repeated, instead of made ones; both ends need the file.",
)
_LAYOUT: Final = click.option(
    "--layout",
    default="muse-glimmer",
    show_default=True,
    metavar="muse-glimmer|FILE",
    help="Shape of the cache: the reference geometry, or a JSON file.",
)


@click.group()
def bench() -> None:
    """Measure moves with rows that no model computed."""


@bench.command()
@click.option("--tokens", required=True, type=click.IntRange(2), help="Length of the prompt.")
@click.option("--held", default=0, show_default=True, help="Tokens that the target holds.")
@click.option(
    "--kind",
    type=click.Choice(["prompt", "session"]),
    default="prompt",
    show_default=True,
    help="A prompt while it is prefilled, or a session that decodes on.",
)
@_LAYOUT
@click.option("--to", metavar="HOST:PORT", help="A kvnode bench serve.")
@click.option("--loopback", is_flag=True, help="Start both ends here, with throw-away credentials.")
@click.option("--node", help="With --to: name of the other end, as pinned here.")
@click.option("--credentials", type=_FOLDER, help="With --to: folder made by enroll.")
@click.option("--data-dir", type=_FOLDER, help="With --to: this end's own files.")
@click.option(
    "--stall",
    default=0.0,
    metavar="SECONDS",
    type=click.FloatRange(0.0, 25.0),
    help="Let the target stop reading once, for so long.",
)
@click.option("--spool", is_flag=True, help="With --loopback: the target's disk, durably, too.")
@click.option(
    "--data-plane",
    type=click.Choice(["mtls", "grpc-plain", "socket"]),
    default="mtls",
    show_default=True,
    help="Where the sealed chunks travel.",
)
@_ROWS
@click.option(
    "--compression",
    type=click.Choice(["off", "on", "auto"]),
    default="off",
    show_default=True,
    help="Of rows; auto: as kvnode migrate does on a link of --link-gbits.",
)
@click.option(
    "--link-gbits",
    type=click.FloatRange(0.001, 1_000_000),
    help="What the link carries, in Gb/s, for --compression auto.",
)
@click.option(
    "--without-pushes",
    is_flag=True,
    help="The move alone, of --kind session: no push and no yardstick before it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def move(
    tokens: int,
    held: int,
    kind: str,
    layout: str,
    to: str | None,
    loopback: bool,
    node: str | None,
    credentials: Path | None,
    data_dir: Path | None,
    stall: float,
    spool: bool,
    data_plane: str,
    rows: Path | None,
    compression: str,
    link_gbits: float | None,
    without_pushes: bool,
    as_json: bool,
) -> None:
    """Move a made cache over the real path and say what it cost.

    Rows appear on the prefill grid at four times the time that the transfer takes, and every row
    is compared after it was installed. Exits with 1 if one is not equal.

    \b
    Examples:
      kvnode bench move --tokens 32768 --loopback
      kvnode bench move --tokens 32768 --to 192.0.2.7:7411 --node big \\
          --credentials C --data-dir D --json
    """
    from node.bench.main import bench_move
    from node.bench.order import BenchOrder, Kind, OtherEnd
    from node.dataplane.options import Plane
    from node.migrate import compresses

    if link_gbits is not None and compression != "auto":
        raise UsageError("--link-gbits: only with --compression auto")
    order = replace(
        BenchOrder.of(tokens, held, Kind(kind), layout, stall),
        spools=spool,
        data_plane=Plane(data_plane),
        rows=rows,
        compress=compresses(link_gbits) if compression == "auto" else compression == "on",
        pushes=not without_pushes,
    )
    other = None
    if spool and not loopback:
        raise UsageError("--spool goes with --loopback; else give it to kvnode bench serve")
    if loopback == (to is not None):
        raise UsageError("give either --loopback or --to HOST:PORT")
    if to is not None:
        if node is None or credentials is None or data_dir is None:
            raise UsageError("--to needs --node, --credentials and --data-dir")
        other = OtherEnd(to, node, credentials, data_dir)
    raise SystemExit(bench_move(order, other, as_json=as_json))


@bench.command()
@click.option("--grpc", "address", required=True, metavar="HOST:PORT", help="Where to listen.")
@_LAYOUT
@click.option("--credentials", required=True, type=_FOLDER, help="Folder made by enroll.")
@click.option("--data-dir", required=True, type=_FOLDER, help="This node's own files.")
@click.option("--spool", is_flag=True, help="Write what arrives to disk before it is owned.")
@click.option("--data-plane", multiple=True, metavar="PLANE=HOST:PORT", help="As kvnode serve has.")
@click.option("--data-plane-from", multiple=True, metavar="NODE", help="As kvnode serve has.")
@click.option("--data-plane-without-tls", is_flag=True, help="As kvnode serve has.")
@_ROWS
@click.option("--stop-on-stdin-end", is_flag=True, hidden=True)
def serve(
    address: str,
    layout: str,
    credentials: Path,
    data_dir: Path,
    spool: bool,
    data_plane: tuple[str, ...],
    data_plane_from: tuple[str, ...],
    data_plane_without_tls: bool,
    rows: Path | None,
    stop_on_stdin_end: bool,
) -> None:
    """Be the other end of kvnode bench move until SIGTERM.

    What arrives is compared and let go; without --spool nothing of it is written to disk. The
    yardstick, a bare TLS socket, listens on a port of its own that the system chooses.
    """
    from node.bench.geometry import read_layout
    from node.bench.main import bench_serve
    from node.bench.order import bench_config
    from node.dataplane.options import PlaneAddress, PlaneOptions

    directory = f"sqlite:{data_dir / 'directory.sqlite'}"
    planes = PlaneOptions(
        tuple(map(PlaneAddress.parse, data_plane)), frozenset(data_plane_from),
        data_plane_without_tls,
    )  # fmt: skip
    config = bench_config(
        Address.parse(address), credentials, data_dir, directory, shares=True, planes=planes
    )
    shape = read_layout(layout)
    bench_serve(config, layout, shape, spools=spool, rows=rows, stop_on_stdin_end=stop_on_stdin_end)
