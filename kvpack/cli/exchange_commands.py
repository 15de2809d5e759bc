"""The commands import and export: packs into a store and out of one, or another engine's caches.

With ``--from`` or ``--to`` it is the other engine's file (``interchange_commands``), else a store.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import click

from kvpack.bundle import BundleIndex, BundleReader
from kvpack.cli.interchange_commands import export_cache, import_cache
from kvpack.cli.options import (
    PATH,
    codec_for,
    compression_option,
    json_option,
    key_options,
    keyring_of,
    require_keys,
)
from kvpack.cli.output import display_name, named, say, say_json
from kvpack.cli.progress import Progress
from kvpack.cli.store_commands import pause
from kvpack.errors import FormatError
from kvpack.interchange import EXTRAS
from kvpack.signer import load_signer
from kvpack.store import (
    NotStoredError,
    WriterTools,
    export_bundle,
    import_bundle,
    pinned_cut,
)
from kvpack.store.interface import ObjectStore, list_all
from kvpack.store.names import CUTS, LINEAGE_BYTES, cut_id_of
from kvpack.store.places import open_place, publish_at, scheme_of

_format = click.Choice(sorted(EXTRAS))
_PREFIX_DIGITS_MIN = 4


class _CountedObjects:
    """The objects of a bundle, counted as they are taken."""

    def __init__(self, reader: BundleReader, progress: Progress) -> None:
        self._reader = reader
        self._progress = progress
        self.index: BundleIndex = reader.index

    def objects(self) -> Iterator[bytes]:
        """Every object in file order, as stored."""
        for data in self._reader.objects():
            yield data
            self._progress.advance(len(data))


class _CountedSink:
    """A sink that counts what goes into it."""

    def __init__(self, sink: object, progress: Progress) -> None:
        self._write = getattr(sink, "write")  # noqa: B009 - any object with a write will do
        self._progress = progress

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``."""
        count = int(self._write(data))
        self._progress.advance(count)
        return count


@click.command(name="import")
@key_options
@click.option("--session", metavar="HEX", help="32 digits: the session it goes on; else a new one.")
@click.option("--create", is_flag=True, help="Make STORE where there is none yet.")
@click.option("--from", "source", type=_format, help="FILE is another engine's prompt cache.")
@click.option("--model", type=PATH, metavar="DIR", help="With --from: the model's folder.")
@click.option(
    "--out", type=PATH, metavar="PACK", help="With --from: a new pack instead of a store."
)
@click.option(
    "--tokens", type=PATH, metavar="IDS", help="With --from: its ids: a JSON list, or .u32."
)
@click.option(
    "--prompt-file", type=PATH, metavar="TEXT", help="With --from: or the prompt it was made of."
)
@compression_option
@json_option
@click.argument("file", metavar="FILE", type=PATH)
@click.argument("store", metavar="[STORE]", required=False, type=PATH)
@click.pass_context
def import_pack(
    context: click.Context,
    keys: tuple[str, ...],
    keyrings: tuple[str, ...],
    session: str | None,
    create: bool,
    source: str | None,
    model: str | None,
    out: str | None,
    tokens: str | None,
    prompt_file: str | None,
    compression: str | None,
    as_json: bool,
    file: str,
    store: str | None,
) -> None:
    """Put the pack FILE into STORE. Every tag and content id is checked first; all or nothing.

    STORE is a folder, or s3://BUCKET/PREFIX.

    With --compression the rows are sealed anew, and the cut has another id than the pack: a later
    delta of the pack does not find it.

    With --from, make PACK of FILE, a prompt cache that another engine saved. Such a file holds no
    token ids: give them, or the prompt. It cannot prove who made it, so the pack continues as
    compatible.

    \b
    kvpack import --key my.key --create session.kvpack packs
    kvpack import --from mlx-lm --model DIR --key my.key --out new.kvpack --tokens ids.json c.st
    """
    if source is not None:
        _no_store(
            context, store=store, session=session, create=create or None, compression=compression
        )
        key = _from_options(context, keys, keyrings, model, out)
        _invoke(
            context, import_cache,
            source=source, model=model, key=key, out=out, tokens=tokens,
            prompt_file=prompt_file, as_json=as_json, file=file,
        )  # fmt: skip
        return
    _only_with(context, "--from", model=model, out=out, tokens=tokens, prompt_file=prompt_file)
    if store is None:
        raise click.UsageError("Missing argument 'STORE'.", context)
    require_keys(context, keys, keyrings)
    lineage = _lineage(context, session)
    name = display_name(file)
    with named(name, as_json):
        keyring = keyring_of(keys, keyrings)
        with BundleReader.open(file, keyring) as reader:
            opened = open_place(store, create=create)
            codec = codec_for(compression, store)
            position = reader.manifest.position
            with Progress("importing", reader.index.footer.chunks_bytes) as progress:
                counted = _CountedObjects(reader, progress)
                cut_id = import_bundle(opened, keyring, counted, lineage, _tools(), codec=codec)
    place = display_name(store)
    if as_json:
        made = {"cut": cut_id.hex(), "session": lineage.hex(), "position": position}
        say_json({"name": name, "store": place, **made})
    else:
        say(f"{name}: {position:,} tokens into {place} as cut {cut_id.hex()[:16]}")


@click.command(name="export")
@key_options
@click.option("--signer", type=PATH, metavar="FILE", help="Sign the pack; from keygen --signer.")
@click.option("--to", "target", type=_format, help="Write another engine's prompt cache instead.")
@click.option("--model", type=PATH, metavar="DIR", help="With --to: the model's folder.")
@click.option(
    "--out", type=PATH, metavar="FILE", help="With --to: a new name: nothing is overwritten."
)
@compression_option
@json_option
@click.argument("place", metavar="STORE|PACK", type=PATH)
@click.argument("cut", metavar="[CUT]", required=False)
@click.argument("pack", metavar="[OUT]", required=False, type=PATH)
@click.pass_context
def export_pack(
    context: click.Context,
    keys: tuple[str, ...],
    keyrings: tuple[str, ...],
    signer: str | None,
    target: str | None,
    model: str | None,
    out: str | None,
    compression: str | None,
    as_json: bool,
    place: str,
    cut: str | None,
    pack: str | None,
) -> None:
    """Write the cut CUT of STORE as the pack OUT. CUT is its id, or the first digits of it.

    STORE and OUT may lie in a bucket: s3://BUCKET/PREFIX, s3://BUCKET/KEY.

    With --to, write the state in PACK as FILE, a prompt cache that another engine loads.

    \b
    kvpack export --key my.key packs 1a2b3c4d out.kvpack
    kvpack export --key my.key s3://bucket/packs 1a2b3c4d s3://bucket/out.kvpack
    kvpack export --to mlx-lm --model DIR --key my.key --out c.safetensors session.kvpack
    """
    if target is not None:
        _no_store(context, cut=cut, out=pack, signer=signer, compression=compression)
        key = _from_options(context, keys, keyrings, model, out)
        _invoke(
            context, export_cache,
            target=target, model=model, keys=(key,), out=out, as_json=as_json, pack=place,
        )  # fmt: skip
        return
    _only_with(context, "--to", model=model, out=out)
    if cut is None or pack is None:
        raise click.UsageError("Missing argument 'CUT' or 'OUT'.", context)
    require_keys(context, keys, keyrings)
    made = display_name(pack)
    with named(display_name(place), as_json):
        keyring = keyring_of(keys, keyrings)
        private = None if signer is None else load_signer(signer)
        store = open_place(place)
        cut_id = _resolve(store, cut)
        codec = codec_for(compression, pack if scheme_of(pack) else str(Path(pack).parent))
        with (
            pinned_cut(store, cut_id, _tools()),
            publish_at(pack) as sink,
            Progress("exporting", 0) as progress,
        ):
            counted = _CountedSink(sink, progress)
            footer = export_bundle(store, keyring, cut_id, counted, private, codec)
    if as_json:
        say_json({"name": made, "cut": cut_id.hex(), "file_bytes": footer.file_bytes})
    else:
        say(f"{made}: cut {cut_id.hex()[:16]}, {footer.file_bytes:,} bytes")


def _invoke(context: click.Context, command: click.Command, **options: object) -> None:
    """Run ``command`` in the place of the one that was called, under its name."""
    if command.callback is None:
        raise RuntimeError(f"{command.name} does nothing")
    context.invoke(command.callback, **options)


def _tools() -> WriterTools:
    return WriterTools(secrets.token_bytes(16), time.time, pause)


def _lineage(context: click.Context, session: str | None) -> bytes:
    if session is None:
        return secrets.token_bytes(LINEAGE_BYTES)
    try:
        lineage = bytes.fromhex(session)
    except ValueError:
        lineage = b""
    if len(lineage) != LINEAGE_BYTES:
        raise click.UsageError(f"--session: expected {2 * LINEAGE_BYTES} hex digits", context)
    return lineage


def _resolve(store: ObjectStore, prefix: str) -> bytes:
    """The one cut whose id begins with ``prefix``.

    Raises:
        NotStoredError: None does.
        FormatError: It is too short, no digits, or several do.
    """
    digits = prefix.lower()
    if len(digits) < _PREFIX_DIGITS_MIN or set(digits) - set("0123456789abcdef"):
        raise FormatError("cut", f"at least {_PREFIX_DIGITS_MIN} hex digits", repr(prefix[:80]))
    found = [cut_id_of(item.name) for item in list_all(store, f"{CUTS}/{digits}")]
    if not found:
        raise NotStoredError(f"{CUTS}/{digits[:64]}")
    if len(found) > 1:
        raise FormatError("cut", "the first digits of one cut", f"those of {len(found)}")
    return found[0]


def _from_options(
    context: click.Context,
    keys: tuple[str, ...],
    keyrings: tuple[str, ...],
    model: str | None,
    out: str | None,
) -> str:
    """The one key file; another engine's file needs a model and a name as well."""
    for option, value in (("--model", model), ("--out", out)):
        if value is None:
            raise click.UsageError(f"Missing option '{option}'.", context)
    if len(keys) != 1 or keyrings:
        raise click.UsageError("another engine's file needs exactly one --key", context)
    return keys[0]


def _no_store(context: click.Context, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"another engine's file takes no {name.upper()}", context)


def _only_with(context: click.Context, option: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} needs {option}", context)
