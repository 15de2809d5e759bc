"""``kvnode enroll``, ``pin``, ``pins`` and ``unpin``: who is who, by files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from node.errors import UsageError

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_FILE: Final = click.Path(path_type=Path)

_CREDENTIALS: Final = click.option(
    "--credentials", required=True, type=_FOLDER, help="Folder made by enroll."
)
_AUTHORITY: Final = click.option(
    "--authority", required=True, type=_FOLDER, help="Folder of the authority."
)


@click.group(invoke_without_command=True)
@click.option("--authority", type=_FOLDER, help="Folder of the authority.")
@click.option("--credentials", type=_FOLDER, help="Folder to make.")
@click.option("--name", help="Name of the node or client.")
@click.option("--tenant-key", type=_FILE, help="Key file of kvpack keygen, copied in.")
@click.pass_context
def enroll(
    context: click.Context,
    authority: Path | None,
    credentials: Path | None,
    name: str | None,
    tenant_key: Path | None,
) -> None:
    """Make keys and certificates. A private key stays in the folder where it was made.

    \b
    On one machine, in one step (makes the authority, too, where there is none yet):
      kvnode enroll --authority A --credentials D --name N
    On two, where only the request and the certificates travel:
      kvnode enroll request --credentials D --name N        on the node
      kvnode enroll sign --authority A request.pem          at the authority
      kvnode enroll accept --credentials D N-cert.pem ca-cert.pem

    Other nodes and clients are pinned afterwards, one by one, with: kvnode pin.
    """
    given = (authority, credentials, name, tenant_key)
    if context.invoked_subcommand is not None:
        if any(value is not None for value in given):
            raise UsageError(f"options of enroll go after {context.invoked_subcommand!r}")
        return
    if authority is None or credentials is None or name is None:
        raise UsageError("enroll: expected --authority, --credentials and --name, or a step")
    from node.enroll import enroll as make
    from node.handover import copy_tenant_key

    make(authority, credentials, name)
    if tenant_key is not None:
        copy_tenant_key(tenant_key, credentials)
    click.echo(str(credentials / "node-cert.pem"))


@enroll.command()
@_AUTHORITY
def authority(authority: Path) -> None:
    """Make a certificate authority: its key stays in the folder."""
    from node.enroll import AUTHORITY_CERTIFICATE, make_authority

    make_authority(authority)
    click.echo(str(authority / AUTHORITY_CERTIFICATE))


@enroll.command()
@click.option("--credentials", required=True, type=_FOLDER, help="Folder to make.")
@click.option("--name", required=True, help="Name of the node or client.")
@click.option("--out", type=_FILE, help="Where to write it; default: request.pem in the folder.")
def request(credentials: Path, name: str, out: Path | None) -> None:
    """Make a key, and a signing request for it to carry to the authority.

    Prints the request's path and the key's fingerprint, which sign prints, too.
    """
    from node.enroll import make_request

    _write_request(make_request(credentials, name), credentials, out)


@enroll.command()
@_CREDENTIALS
@click.option("--out", type=_FILE, help="Where to write it; default: request.pem in the folder.")
def renew(credentials: Path, out: Path | None) -> None:
    """Make the next key beside the present one, and a signing request for it.

    The present certificate stays in use until the next one is accepted. Before that, let every
    peer pin the next one with: kvnode pin --renewed. A running node needs no restart.
    """
    from node.enroll import renew_request

    _write_request(renew_request(credentials), credentials, out)


@enroll.command()
@_AUTHORITY
@click.argument("request", type=_FILE)
@click.option("--out", type=_FILE, help="Default: NAME-cert.pem beside the request.")
def sign(authority: Path, request: Path, out: Path | None) -> None:
    """Make the certificate that a signing request asks for.

    Prints the certificate's path and the fingerprint of the key that it is for.
    """
    from node.certificates import key_fingerprint, load_request, request_name
    from node.enroll import sign_request
    from node.files import read_public, write_private

    content = read_public(request)
    asked = load_request(content)
    certificate = sign_request(authority, content)
    path = out or request.with_name(f"{request_name(asked)}-cert.pem")
    write_private(path, certificate)
    click.echo(f"{path} {key_fingerprint(asked)}")


@enroll.command()
@_CREDENTIALS
@click.argument("certificate", type=_FILE)
@click.argument("authority_certificate", type=_FILE)
def accept(credentials: Path, certificate: Path, authority_certificate: Path) -> None:
    """Take the certificate that the authority made, and the authority's own.

    From then on the folder is enrolled; if it was renewed, the new pair is the one in use.
    """
    from node.enroll import NODE_CERTIFICATE
    from node.enroll import accept as take
    from node.files import read_public

    take(credentials, read_public(certificate), read_public(authority_certificate))
    click.echo(str(credentials / NODE_CERTIFICATE))


@enroll.command(name="tenant-key")
@_CREDENTIALS
@click.argument("key", type=_FILE)
def tenant_key(credentials: Path, key: Path) -> None:
    """Hand a tenant's key over: copy a key file of kvpack keygen into a credentials folder."""
    from node.handover import copy_tenant_key

    copy_tenant_key(key, credentials)
    click.echo(str(credentials / "tenant.key"))


@click.command()
@_CREDENTIALS
@click.option("--node", "nodes", type=_FILE, multiple=True, help="Certificate of another node.")
@click.option("--client", "clients", type=_FILE, multiple=True, help="Certificate of a client.")
@click.option("--renewed", is_flag=True, help="Another leaf of that name may stay pinned.")
def pin(
    credentials: Path, nodes: tuple[Path, ...], clients: tuple[Path, ...], renewed: bool
) -> None:
    """Pin certificates: nodes may move sessions here, clients may use them.

    A peer that renews its certificate has two leaves for a while: pin the new one with --renewed,
    and remove the old one with: kvnode unpin --leaf. A running node needs no restart.
    """
    from node.credentials import Role
    from node.credentials import pin as pin_one
    from node.files import read_public

    if not nodes and not clients:
        raise UsageError("nothing to pin: give --node or --client")
    for role, paths in ((Role.NODE, nodes), (Role.CLIENT, clients)):
        for path in paths:
            peer = pin_one(credentials, read_public(path), role, beside_old=renewed)
            click.echo(f"{peer.name} {peer.digest.hex()}")


@click.command()
@_CREDENTIALS
@click.option("--node", "node_name", help="Name of a node.")
@click.option("--client", "client_name", help="Name of a client.")
@click.option("--leaf", metavar="HEX", help="Only the leaf whose digest begins so.")
def unpin(
    credentials: Path, node_name: str | None, client_name: str | None, leaf: str | None
) -> None:
    """Let a peer in no longer. Its calls are refused from then on; no restart is needed."""
    from node.credentials import Role
    from node.credentials import unpin as unpin_one

    if (node_name is None) == (client_name is None):
        raise UsageError("unpin: expected one of --node and --client")
    role = Role.CLIENT if node_name is None else Role.NODE
    for peer in unpin_one(credentials, node_name or client_name or "", role, leaf):
        click.echo(f"{peer.name} {peer.digest.hex()}")


@click.command()
@_CREDENTIALS
def pins(credentials: Path) -> None:
    """List who is pinned: name, role, leaf, last day of its certificate."""
    from node.certificates import load_certificate
    from node.credentials import Role, read_pins

    for role in Role:
        for peer in read_pins(credentials, role):
            until = load_certificate(peer.certificate_pem, peer.name).not_valid_after_utc
            click.echo(f"{peer.name} {role.value[:-1]} {peer.digest.hex()} {until:%Y-%m-%d}")


def _write_request(content: bytes, credentials: Path, out: Path | None) -> None:
    from node.certificates import key_fingerprint, load_request
    from node.enroll import REQUEST
    from node.files import replace_private, write_private

    if out is None:
        replace_private(credentials / REQUEST, content)
    else:
        write_private(out, content)
    click.echo(f"{out or credentials / REQUEST} {key_fingerprint(load_request(content))}")
