"""``kvnode apikey``: who may call the HTTP port."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def apikey() -> None:
    """Keys for the HTTP port."""


@apikey.command()
@click.option(
    "--file", "path", required=True, type=click.Path(path_type=Path), help="Made if missing."
)
@click.option("--tenant", required=True, metavar="NAME", help="Whose key it is.")
@click.option("--admin", is_flag=True, help="It may also see metrics, slots and the status page.")
def add(path: Path, tenant: str, admin: bool) -> None:
    """Make a key and print it, once: the file holds its SHA-256 alone.

    \b
    Example:
      kvnode apikey add --file keys --tenant alice
      kvnode serve --model DIR --api-key-file keys
    """
    from node.http.auth import add_key

    click.echo(add_key(path, tenant, is_admin=admin))
