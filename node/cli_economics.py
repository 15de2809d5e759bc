"""``kvnode economics``: its options, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import click

#: Where ``kvnode serve`` listens unless it is told otherwise.
URL: Final = "http://127.0.0.1:8080"


@click.command()
@click.option("--url", default=URL, show_default=True, help="Of the node's HTTP port.")
@click.option(
    "--key-file", type=click.Path(path_type=Path, dir_okay=False),
    help="File with the key of an administrator, readable by its owner alone.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def economics(url: str, key_file: Path | None, as_json: bool) -> None:
    """Show what kept cuts took to compute on a node, and to bring back there.

    Times are that node's own measurements of the very same cut. What it did not measure is
    said to be so, and never estimated.
    """
    from node.economics.report import fetch, table

    answer = fetch(url, "" if key_file is None else _key(key_file))
    if as_json:
        click.echo(json.dumps(answer))
    elif answer["cuts"]:
        click.echo(table(answer["cuts"]))
    else:
        click.echo("nothing was measured yet")


def _key(path: Path) -> str:
    from node.errors import CredentialsError
    from node.files import read_private

    key = read_private(path).decode("ascii", errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise CredentialsError(f"{path}: expected one key, as kvnode apikey add prints it")
    return key
