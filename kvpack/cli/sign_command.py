"""The command sign: say with an Ed25519 key who stored a pack."""

from __future__ import annotations

import click

from kvpack.bundle import BundleReader, publish_new
from kvpack.bundle.resign import sign_bundle
from kvpack.cli.options import PATH, json_option, key_options, keyring_of, require_keys
from kvpack.cli.output import display_name, named, say, say_json
from kvpack.cli.progress import Progress
from kvpack.signer import load_signer


@click.command(name="sign")
@key_options
@click.option("--signer", required=True, type=PATH, metavar="FILE", help="From keygen --signer.")
@json_option
@click.argument("source", metavar="IN", type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@click.pass_context
def sign(
    context: click.Context,
    keys: tuple[str, ...],
    keyrings: tuple[str, ...],
    signer: str,
    as_json: bool,
    source: str,
    target: str,
) -> None:
    """Write the pack IN as OUT, signed. Nothing is sealed again; every tag is checked first.

    Whoever has the public file can then verify OUT with --signer and no secret. A signature that IN
    carries already is replaced.

    \b
    kvpack sign --key my.key --signer my.signer session.kvpack signed.kvpack
    """
    require_keys(context, keys, keyrings)
    name = display_name(source)
    with named(name, as_json):
        keyring, private = keyring_of(keys, keyrings), load_signer(signer)
        with (
            BundleReader.open(source, keyring) as reader,
            publish_new(target) as sink,
            Progress("signing", reader.index.footer.chunks_bytes) as progress,
        ):
            footer = sign_bundle(reader, keyring, private, sink, progress.advance)
    public = private.public_key().public_bytes_raw().hex()
    made = display_name(target)
    if as_json:
        say_json({"name": made, "signer": public, "file_bytes": footer.file_bytes})
    else:
        say(f"{made}: signed by {public[:16]}…, {footer.file_bytes:,} bytes")
