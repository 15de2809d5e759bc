"""``kvnode pair``: two commands, one on each machine, and a short code to compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from node.config import Address

if TYPE_CHECKING:
    from node.pair.party import Wish
    from node.pair.talk import Paired

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)

_SHARED: Final = (
    click.option("--credentials", required=True, type=_FOLDER, help="Folder to pair, or to make."),
    click.option("--name", help="Name to be enrolled by, if the folder is not enrolled yet."),
    click.option(
        "--as",
        "role",
        type=click.Choice(["node", "client"]),
        default="node",
        show_default=True,
        help="What this machine is for the other one.",
    ),
    click.option("--with-tenant-key", is_flag=True, help="Hand the tenant key over, too."),
    click.option("--renewed", is_flag=True, help="The other one may have an older leaf pinned."),
    click.option(
        "--timeout",
        default=120.0,
        show_default=True,
        metavar="SECONDS",
        type=click.FloatRange(1.0, 600.0),
        help="For all of it.",
    ),
)


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SHARED):
        command = option(command)
    return command


@click.group()
def pair() -> None:
    """Make two machines trust each other: one listens, one joins, two people compare a code.

    \b
    On the machine with the authority (which is made if there is none yet):
      kvnode pair listen --credentials D --authority A --name a --bind 10.0.0.1:7410
    On the other one:
      kvnode pair join --credentials D --name b 10.0.0.1:7410

    Both terminals show six digits. If they are the same, nobody is in between; type yes on both.
    Each side then has a certificate and the other one's pinned. Otherwise nothing was written.
    """


@pair.command()
@_shared
@click.option("--authority", type=_FOLDER, help="Authority that signs; made if there is none yet.")
@click.option("--bind", default="127.0.0.1:0", show_default=True, metavar="HOST:PORT")
def listen(authority: Path | None, bind: str, timeout: float, **wishes: Any) -> None:  # noqa: ANN401
    """Wait for one other machine, and pair with it.

    An address beyond loopback is permitted: only the code proves who is there, on any network.
    """
    from node.pair.console import Console
    from node.pair.talk import listen_and_pair

    wish = _wish(authority, **wishes)
    _report(listen_and_pair(wish, Address.parse(bind), timeout, Console()))


@pair.command()
@_shared
@click.argument("address", metavar="HOST:PORT")
def join(address: str, timeout: float, **wishes: Any) -> None:  # noqa: ANN401
    """Connect to a machine that listens, and pair with it."""
    from node.pair.console import Console
    from node.pair.talk import join_and_pair

    wish = _wish(None, **wishes)
    _report(join_and_pair(wish, Address.parse(address), timeout, Console()))


def _wish(
    authority: Path | None,
    credentials: Path,
    name: str | None,
    role: str,
    with_tenant_key: bool,
    renewed: bool,
) -> Wish:
    from node.credentials import Role
    from node.pair.party import Wish

    kind = Role.NODE if role == "node" else Role.CLIENT
    return Wish(credentials, name, kind, authority, with_tenant_key, renewed)


def _report(paired: Paired) -> None:
    peer = paired.peer
    click.echo(f"{peer.name} {peer.role.value[:-1]} {peer.digest.hex()}")
    if not paired.heard:
        click.echo(
            "kvnode: hint: paired here, but the other side was not heard to its end; if it says "
            f"that it is not paired, run: kvnode unpin --{peer.role.value[:-1]} {peer.name}",
            err=True,
        )
