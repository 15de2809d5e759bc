"""``kvnode produce``: a node that computes prompts for others, with PyTorch instead of MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from node.config import LEASE_S, VOLUME_WORST_S, Address, ServeConfig, let_grpc_speak

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option(
    "--backend",
    type=click.Choice(["transformers"]),
    default="transformers",
    show_default=True,
    help="What computes; it comes with the extra torch.",
)
@click.option("--model", required=True, type=_FOLDER, help="Model folder, not quantised.")
@click.option(
    "--device", metavar="cuda|cuda:N|cpu", help="Where to compute; default: CUDA, if torch has one."
)
@click.option(
    "--attention",
    type=click.Choice(["sdpa", "eager"]),
    default="sdpa",
    show_default=True,
    help="How transformers attends.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="Of the rows: what the other end has; default: the weights' own.",
)
@click.option(
    "--grpc", "address", required=True, metavar="HOST:PORT", help="Where to listen for gRPC."
)
@click.option(
    "--advertise", metavar="HOST:PORT", help="Where other nodes reach this one; default: --grpc."
)
@click.option("--data-dir", required=True, type=_FOLDER, help="This node's own files.")
@click.option("--credentials", required=True, type=_FOLDER, help="Folder made by enroll.")
@click.option(
    "--directory", required=True, metavar="URL", help="Who owns what; the same as its peers'."
)
@click.option(
    "--lease",
    default=LEASE_S,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0.5, 600.0),
    help="As for kvnode serve.",
)
@click.option(
    "--volume-worst",
    default=VOLUME_WORST_S,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0.001, 60.0),
    help="Longest durable write in --data-dir.",
)
@click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]),
)
@click.option("--stop-on-stdin-end", is_flag=True, hidden=True)
def produce(**options: Any) -> None:  # noqa: ANN401 - click's
    """Compute prompts for other nodes with PyTorch, on a machine that has no MLX.

    \b
    Example:
      kvnode produce --model DIR --device cuda --grpc 192.0.2.7:7413 --data-dir D \\
          --credentials C --directory grpc://a@192.0.2.1:7411
    A node with --prefill remote --producer NAME@HOST:PORT has long prompts computed here; kvnode
    session open and migrate --mode copy reach it like any other. Its rows go on as compatible.
    Before it serves, a short known prompt is compared with the reference, layer by layer.
    """
    from node.produce.main import Order, run
    from node.produce.model import require_torch

    # Both before anything heavy: what is missing is said at once.
    require_torch()
    let_grpc_speak()
    run(
        Order(
            _config(options), options["device"], options["attention"], options["dtype"],
            options["log_level"], options["stop_on_stdin_end"],
        )
    )  # fmt: skip


def _config(options: dict[str, Any]) -> ServeConfig:
    advertise = options["advertise"]
    return ServeConfig(
        Address.parse(options["address"]),
        options["model"],
        options["data_dir"],
        options["credentials"],
        options["directory"],
        options["volume_worst"],
        options["lease"],
        advertise=None if advertise is None else Address.parse(advertise),
        # It takes no sessions in, so it has room for none.
        kv_bytes=0,
    )
