"""The command verify."""

from __future__ import annotations

import io
import os
import re
import sys
from dataclasses import dataclass

import click

from kvpack.bundle import Depth
from kvpack.cli import output
from kvpack.cli.options import PATH, json_option, key_options, keyring_of
from kvpack.cli.progress import Progress
from kvpack.cli.render import description_json
from kvpack.errors import EXIT_GOOD, KvpackError
from kvpack.expectation import load_identity, load_layout
from kvpack.keys import Keyring
from kvpack.signer import load_public_signer
from kvpack.verify import (
    Expectation,
    Sample,
    VerifyReport,
    verify_bundle,
    verify_signature,
    verify_stream,
)

_CHECKED = {
    Depth.QUICK: "manifest, shape and chunk headers; no payload was read",
    Depth.FULL: "manifest, shape and every chunk",
    Depth.DEEP: "manifest, shape, every chunk and every content id",
}


@dataclass(frozen=True, slots=True)
class _Task:
    """What is asked of every pack."""

    keyring: Keyring | None
    depth: Depth
    expectation: Expectation
    sample: Sample | None
    signer: bytes | None
    as_json: bool
    alone: bool


@click.command(name="verify")
@key_options
@click.option(
    "--signer", type=PATH, metavar="PUB", help="Who must have signed it; without a key too."
)
@click.option("--quick", is_flag=True, help="Read no payload: headers, manifest and shape only.")
@click.option("--deep", is_flag=True, help="Recompute every content id as well.")
@click.option("--sample", metavar="PERCENT", help="Open only so many of the chunks, such as 5%.")
@click.option("--expect-layout", type=PATH, metavar="FILE", help="It must have the shape in FILE.")
@click.option(
    "--expect-identity", type=PATH, metavar="FILE", help="It must be of the model in FILE."
)
@json_option
@click.argument("packs", nargs=-1, required=True, metavar="PACK...", type=PATH)
@click.pass_context
def verify(
    context: click.Context,
    keys: tuple[str, ...],
    keyrings: tuple[str, ...],
    signer: str | None,
    quick: bool,
    deep: bool,
    sample: str | None,
    expect_layout: str | None,
    expect_identity: str | None,
    as_json: bool,
    packs: tuple[str, ...],
) -> None:
    """Verify each PACK: whole, authentic, and one consistent state. PACK - reads a pipe.

    Prints NAME: OK. A lone PACK that fails prints nothing on standard output; of several, each gets
    its line there, NAME: FAILED (reason) included. The exit code is that of the first that failed.

    A FILE of --expect-layout or --expect-identity is what inspect --json writes.

    \b
    kvpack verify --key my.key session.kvpack
    kvpack verify --signer my.signer.pub signed.kvpack
    """
    has_key = bool(keys or keyrings)
    if not has_key and signer is None:
        raise click.UsageError(
            "verify needs a key: --key FILE or --keyring DIR; or --signer PUB", context
        )
    _refuse_contradictions(context, has_key, signer, quick, deep, sample, packs)
    task = _Task(
        keyring=keyring_of(keys, keyrings) if has_key else None,
        depth=Depth.QUICK if quick else Depth.DEEP if deep else Depth.FULL,
        expectation=Expectation(
            identity=None if expect_identity is None else load_identity(expect_identity),
            layout=None if expect_layout is None else load_layout(expect_layout),
        ),
        sample=None if sample is None else _sample(context, sample),
        signer=None if signer is None else load_public_signer(signer),
        as_json=as_json,
        alone=len(packs) == 1,
    )
    verdict = EXIT_GOOD
    for pack in packs:
        failed = _verify_one(pack, task)
        verdict = verdict or failed
    context.exit(verdict)


def _refuse_contradictions(
    context: click.Context,
    has_key: bool,
    signer: str | None,
    quick: bool,
    deep: bool,
    sample: str | None,
    packs: tuple[str, ...],
) -> None:
    if quick and deep:
        raise click.UsageError("--quick and --deep contradict each other", context)
    if quick and sample is not None:
        raise click.UsageError("--quick and --sample contradict each other", context)
    if not has_key and (quick or deep or sample is not None):
        raise click.UsageError("--quick, --deep and --sample need a key", context)
    if "-" in packs and (signer is not None or sample is not None):
        raise click.UsageError("a pipe is read once, in order: no --signer, no --sample", context)


def _sample(context: click.Context, text: str) -> Sample:
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?%?", text) is None:
        raise click.UsageError(f"--sample: expected a percentage such as 5%, not {text!r}", context)
    percent = float(text.removesuffix("%"))
    if not 0 < percent <= 100:
        raise click.UsageError("--sample: expected more than 0 and at most 100 percent", context)
    return Sample(percent)


def _verify_one(pack: str, task: _Task) -> int:
    """Verify one pack and say so; returns its exit code."""
    name = output.display_name(pack)
    try:
        report = _report(pack, task)
    except (KvpackError, OSError) as error:
        if task.as_json:
            output.say_json(output.NamedError(name, error, task.as_json).as_json())
        elif not task.alone:
            output.say(f"{name}: FAILED ({output.reason_of(error)})")
        output.fail(error, name)
        return output.exit_code_of(error)
    if task.as_json:
        output.say_json(_report_json(name, report))
    else:
        output.say(f"{name}: OK{_what_was_checked(report)}")
    return EXIT_GOOD


def _report(pack: str, task: _Task) -> VerifyReport:
    if task.keyring is not None and pack == "-":
        stream = io.FileIO(sys.stdin.fileno(), closefd=False)
        return verify_stream(stream, task.keyring, task.depth, task.expectation)
    passes = 2 if task.keyring is not None and task.signer is not None else 1
    total_bytes = passes * os.stat(pack).st_size  # noqa: PTH116 - the path as typed, not as parsed
    with Progress(output.display_name(pack), total_bytes) as progress:
        if task.keyring is not None:
            return verify_bundle(
                pack,
                task.keyring,
                task.depth,
                task.expectation,
                sample=task.sample,
                signer=task.signer,
                progress=progress.advance,
            )
        if task.signer is None:
            raise RuntimeError("neither key nor signer")
        return verify_signature(pack, task.signer, task.expectation, progress.advance)


def _report_json(name: str, report: VerifyReport) -> dict[str, object]:
    return {
        "name": name,
        "ok": True,
        "depth": "signature" if report.depth is None else report.depth.value,
        "opened_chunks": report.opened,
        "signer": None if report.signer is None else report.signer.hex(),
        **description_json(report.description),
    }


def _what_was_checked(report: VerifyReport) -> str:
    """What OK means, wherever it is not the default."""
    said = []
    count = report.description.footer.chunk_count
    if report.depth is None:
        said.append("the signature over every stored byte; nothing was decrypted")
    elif report.depth is not Depth.QUICK and report.opened < count:
        deep = " and their content ids" if report.depth is Depth.DEEP else ""
        said.append(f"manifest, shape and {report.opened} of {count} chunks{deep}")
    elif report.depth is not Depth.FULL:
        said.append(_CHECKED[report.depth])
    if report.signer is not None:
        said.append(f"signer {report.signer.hex()[:16]}…")
    return f" ({'; '.join(said)})" if said else ""
