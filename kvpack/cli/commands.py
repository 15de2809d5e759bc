"""The command itself, and keygen and inspect."""

from __future__ import annotations

import click

from kvpack import __version__
from kvpack.cli import output
from kvpack.cli.options import PATH, json_option
from kvpack.cli.output import named
from kvpack.cli.render import description_json, description_lines
from kvpack.describe import inspect_bundle
from kvpack.keys import generate_key, write_key_file
from kvpack.signer import generate_signer, write_signer_files


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvpack", message="%(prog)s %(version)s")
def kvpack() -> None:
    """Verify, look into and keep .kvpack files: the sealed KV state of LLM sessions.

    Exit codes: 0 good, 1 other failure, 2 usage, 10 malformed, 11 not authentic, 12 other layout or
    identity, 13 check found damage, 14 incomplete (parent missing), 130 interrupted.
    """


@kvpack.command()
@click.option("--tenant", help='Whose packs it seals; by default "default".')
@click.option("--epoch", type=int, help="Counted from 1, the default.")
@click.option("--signer", is_flag=True, help="Make an Ed25519 signer: FILE, and FILE.pub.")
@json_option
@click.argument("file", type=PATH)
@click.pass_context
def keygen(
    context: click.Context,
    tenant: str | None,
    epoch: int | None,
    signer: bool,
    as_json: bool,
    file: str,
) -> None:
    """Make a new root key in FILE (mode 0600, never overwritten).

    Whoever has the file can read and forge this tenant's packs; whoever loses it loses them. A copy
    of FILE is the whole backup.

    \b
    kvpack keygen --tenant acme my.key
    kvpack keygen --signer my.signer
    """
    if not signer:
        owner, number = "default" if tenant is None else tenant, 1 if epoch is None else epoch
        _make_key(file, owner, number, as_json=as_json)
        return
    if tenant is not None or epoch is not None:
        raise click.UsageError("a signer has neither --tenant nor --epoch", context)
    _make_signer(file, as_json=as_json)


def _make_key(file: str, tenant: str, epoch: int, *, as_json: bool) -> None:
    name = output.display_name(file)
    with named(name, as_json):
        key = generate_key(tenant, epoch)
        write_key_file(file, key)
    if as_json:
        output.say_json({"key": name, "tenant": key.tenant, "epoch": key.epoch})
    else:
        output.say(f"{name}: new key of tenant {key.tenant!r}, epoch {key.epoch}")
        output.say_hint("keep a copy in a safe place: without this file its packs are lost")


def _make_signer(file: str, *, as_json: bool) -> None:
    name = output.display_name(file)
    with named(name, as_json):
        made = generate_signer()
        public = output.display_name(write_signer_files(file, made))
    digits = made.public_key().public_bytes_raw().hex()
    if as_json:
        output.say_json({"signer": name, "public_file": public, "public_key": digits})
    else:
        output.say(f"{name}: new signer {digits[:16]}…")
        output.say(f"{public}: its public key, for whoever verifies")


@kvpack.command()
@json_option
@click.argument("pack", type=PATH)
def inspect(as_json: bool, pack: str) -> None:
    """Show what PACK says about itself. Needs no key, and proves nothing."""
    name = output.display_name(pack)
    with named(name, as_json):
        description = inspect_bundle(pack)
    if as_json:
        output.say_json({"name": name, **description_json(description)})
        return
    output.say(f"{name}: not verified: without the key everything below is only a claim")
    for line in description_lines(description):
        output.say(line)
