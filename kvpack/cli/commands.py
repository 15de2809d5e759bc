"""The commands: keygen, inspect, verify."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click

from kvpack import __version__
from kvpack.bundle import Depth
from kvpack.cli import output
from kvpack.cli.render import description_json, description_lines
from kvpack.describe import inspect_bundle
from kvpack.errors import EXIT_GOOD, KvpackError
from kvpack.keys import Keyring, generate_key, load_key_file, load_keyring, write_key_file
from kvpack.verify import VerifyReport, verify_bundle, verify_stream

_CHECKED = {
    Depth.QUICK: "manifest, shape and chunk headers; no payload was read",
    Depth.FULL: "manifest, shape and every chunk",
    Depth.DEEP: "manifest, shape, every chunk and every content id",
}

_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvpack", message="%(prog)s %(version)s")
def kvpack() -> None:
    """Verify and look into .kvpack files: the sealed KV state of LLM sessions.

    Exit codes: 0 good, 1 other failure, 2 usage, 10 malformed, 11 not authentic, 12 other layout or
    identity, 14 incomplete (parent missing), 130 interrupted.
    """


@kvpack.command()
@click.option("--tenant", default="default", show_default=True, help="Whose packs it seals.")
@click.option("--epoch", default=1, show_default=True, type=int, help="Counted from 1.")
@_json_option
@click.argument("file")
def keygen(tenant: str, epoch: int, as_json: bool, file: str) -> None:
    """Make a new root key in FILE (mode 0600, never overwritten).

    Whoever has the file can read and forge this tenant's packs; whoever loses it loses them. A copy
    of FILE is the whole backup.
    """
    key = generate_key(tenant, epoch)
    write_key_file(file, key)
    name = output.display_name(file)
    if as_json:
        output.say_json({"key": name, "tenant": key.tenant, "epoch": key.epoch})
    else:
        output.say(f"{name}: new key of tenant {key.tenant!r}, epoch {key.epoch}")
        output.say_hint("keep a copy in a safe place: without this file its packs are lost")


@kvpack.command()
@_json_option
@click.argument("pack")
def inspect(as_json: bool, pack: str) -> None:
    """Show what PACK says about itself. Needs no key, and proves nothing."""
    name = output.display_name(pack)
    try:
        description = inspect_bundle(pack)
    except (KvpackError, OSError) as error:
        raise NamedError(name, error, as_json) from error
    if as_json:
        output.say_json({"name": name, **description_json(description)})
        return
    output.say(f"{name}: not verified: without the key everything below is only a claim")
    for line in description_lines(description):
        output.say(line)


@kvpack.command()
@click.option("--key", "keys", multiple=True, metavar="FILE", help="A key file; may be repeated.")
@click.option("--keyring", metavar="DIR", help="A folder of *.key files.")
@click.option("--quick", is_flag=True, help="Read no payload: headers, manifest and shape only.")
@click.option("--deep", is_flag=True, help="Recompute every content id as well.")
@_json_option
@click.argument("packs", nargs=-1, required=True, metavar="PACK...")
@click.pass_context
def verify(
    context: click.Context,
    keys: tuple[str, ...],
    keyring: str | None,
    quick: bool,
    deep: bool,
    as_json: bool,
    packs: tuple[str, ...],
) -> None:
    """Verify each PACK: whole, authentic, and one consistent state. PACK - reads a pipe.

    Prints NAME: OK. A lone PACK that fails prints nothing on standard output; of several, each gets
    its line there, NAME: FAILED (reason) included. The exit code is that of the first that failed.
    """
    if not keys and keyring is None:
        raise click.UsageError("verify needs a key: --key FILE or --keyring DIR", context)
    if quick and deep:
        raise click.UsageError("--quick and --deep contradict each other", context)
    depth = Depth.QUICK if quick else Depth.DEEP if deep else Depth.FULL
    held = _keyring(keys, keyring)
    verdict = EXIT_GOOD
    for pack in packs:
        failed = _verify_one(pack, held, depth, as_json=as_json, alone=len(packs) == 1)
        verdict = verdict or failed
    context.exit(verdict)


def _verify_one(pack: str, keyring: Keyring, depth: Depth, *, as_json: bool, alone: bool) -> int:
    """Verify one pack and say so; returns its exit code."""
    name = output.display_name(pack)
    try:
        if pack == "-":
            stream = io.FileIO(sys.stdin.fileno(), closefd=False)
            report = verify_stream(stream, keyring, depth)
        else:
            report = verify_bundle(pack, keyring, depth)
    except (KvpackError, OSError) as error:
        if as_json:
            output.say_json(NamedError(name, error, as_json).as_json())
        elif not alone:
            output.say(f"{name}: FAILED ({output.reason_of(error)})")
        output.fail(error, name)
        return output.exit_code_of(error)
    _say_report(name, report, as_json=as_json)
    return EXIT_GOOD


def _say_report(name: str, report: VerifyReport, *, as_json: bool) -> None:
    if as_json:
        checked = {"name": name, "ok": True, "depth": report.depth.value}
        output.say_json({**checked, **description_json(report.description)})
        return
    suffix = "" if report.depth is Depth.FULL else f" ({_CHECKED[report.depth]})"
    output.say(f"{name}: OK{suffix}")


def _keyring(keys: tuple[str, ...], folder: str | None) -> Keyring:
    held = [load_key_file(key) for key in keys]
    return Keyring([*held, *(load_keyring(Path(folder)) if folder is not None else ())])


class NamedError(Exception):
    """A failure of one named pack, on its way to the one place that reports failures."""

    def __init__(self, name: str, error: KvpackError | OSError, as_json: bool) -> None:
        self.name = name
        self.error = error
        self.wants_json = as_json
        super().__init__(name)

    def as_json(self) -> dict[str, object]:
        """The failure for programs."""
        return {
            "name": self.name,
            "ok": False,
            "reason": output.reason_of(self.error),
            "message": output.message_of(self.error),
            "exit_code": output.exit_code_of(self.error),
        }
