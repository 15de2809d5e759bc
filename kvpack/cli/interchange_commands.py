"""The commands import and export: caches of other engines as packs, and back."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Final

import click

from kvpack import limits
from kvpack.bundle import BundleReader, Header, publish_new, read_snapshot, require_whole
from kvpack.bundle.reader import open_regular
from kvpack.bundle.source import fill_from
from kvpack.cli import output
from kvpack.errors import LimitError
from kvpack.identity import require_same_identity
from kvpack.interchange import (
    EXTRAS,
    CacheFileError,
    Continuation,
    PromptFileError,
    find_format,
    write_foreign_cache,
)
from kvpack.keys import Keyring, load_key_file
from kvpack.layout import Producer

#: A JSON list of the most ids there may be: eight digits, a comma and a space for each.
_TOKEN_FILE_BYTES_MAX: Final = 10 * limits.POSITION_MAX
#: No prompt of the most tokens there may be is longer in practice.
_PROMPT_FILE_BYTES_MAX: Final = 4 * limits.POSITION_MAX

_format = click.Choice(sorted(EXTRAS))
_model = click.option("--model", required=True, metavar="DIR", help="The model's folder.")
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")


@click.command(name="import")
@click.option("--from", "source", required=True, type=_format, help="Whose cache FILE is.")
@_model
@click.option("--key", required=True, metavar="KEY", help="The key file that seals the pack.")
@click.option("--out", required=True, metavar="PACK", help="A new name: nothing is overwritten.")
@click.option("--tokens", metavar="IDS", help="Token ids in the cache: a JSON list, or .u32.")
@click.option("--prompt-file", metavar="TEXT", help="Or the prompt that the cache was made of.")
@_json
@click.argument("file", metavar="FILE")
@click.pass_context
def import_cache(
    context: click.Context,
    source: str,
    model: str,
    key: str,
    out: str,
    tokens: str | None,
    prompt_file: str | None,
    as_json: bool,
    file: str,
) -> None:
    """Make PACK of FILE, a prompt cache that another engine saved.

    Such a file holds no token ids, and a pack is nothing without them: give the ids, or the prompt
    as it was given to mlx_lm.cache_prompt. Their number must be the cache's; that they are the
    right ones is on you. The file cannot prove who made it, so the pack continues as compatible.
    """
    if (tokens is None) == (prompt_file is None):
        raise click.UsageError(
            "the cache holds no token ids: give either --tokens IDS or --prompt-file TEXT", context
        )
    sealing = load_key_file(key)
    loaded = find_format(source).open_model(Path(model))
    if tokens is not None:
        ids = _token_ids(tokens)
    else:
        ids = loaded.encode_prompt(_prompt(str(prompt_file)))
    cache = loaded.read(_read_whole(file, loaded.file_bytes_max), ids)
    header = Header.of(loaded.identity(sealing.tenant), sealing.epoch)
    with publish_new(out) as sink:
        footer = write_foreign_cache(sink, sealing, header, cache)
    report = {
        "name": output.display_name(out),
        "position": cache.position,
        "producer": cache.producer.value,
        "state": "exact",
        "continuation": Continuation.COMPATIBLE.value,
        "file_bytes": footer.file_bytes,
    }
    _say(report, f"{cache.position:,} tokens from {source}", as_json=as_json)


@click.command(name="export")
@click.option("--to", "target", required=True, type=_format, help="Whose cache to write.")
@_model
@click.option("--key", "keys", required=True, multiple=True, metavar="KEY", help="A key file.")
@click.option("--out", required=True, metavar="FILE", help="A new name: nothing is overwritten.")
@_json
@click.argument("pack", metavar="PACK")
def export_cache(
    target: str, model: str, keys: tuple[str, ...], out: str, as_json: bool, pack: str
) -> None:
    """Write the state in PACK as FILE, a prompt cache that another engine loads.

    A pack that came from there goes back as it was: its rings begin where they began. One of our
    own engine continues there as compatible: other kernels, other bits. FILE is not encrypted and
    names DIR as its model.
    """
    keyring = Keyring([load_key_file(key) for key in keys])
    with BundleReader.open(pack, keyring) as reader:
        header, manifest = reader.index.header, reader.index.manifest
        require_whole(manifest)
        loaded = find_format(target).open_model(Path(model))
        require_same_identity(loaded.identity(header.tenant), header.identity)
        snapshot = read_snapshot(reader)
    pieces = loaded.write(snapshot, manifest.foreign_ring_heads, model)
    with publish_new(out) as sink:
        file_bytes = sum(sink.write(piece) for piece in pieces)
    # What came from there is back where it was; whether that is the same build is not known here.
    returns = manifest.producer is Producer.MLX_LM
    report = {
        "name": output.display_name(out),
        "position": manifest.position,
        "producer": manifest.producer.value,
        "state": "exact",
        "continuation": None if returns else Continuation.COMPATIBLE.value,
        "file_bytes": file_bytes,
    }
    _say(report, f"{manifest.position:,} tokens for {target}", as_json=as_json)


def _say(report: dict[str, object], what: str, *, as_json: bool) -> None:
    if as_json:
        output.say_json(report)
        return
    word = report["continuation"]
    continues = f"continues as {word}" if word else "continues where it came from"
    output.say(
        f"{report['name']}: {what}, {report['file_bytes']:,} bytes; state exact, {continues}"
    )


def _read_whole(path: str | os.PathLike[str], bytes_max: int) -> memoryview:
    """All of a regular file, if it is not longer than ``bytes_max`` and does not change meanwhile.

    Raises:
        LimitError: It is longer.
        CacheFileError: It grew or shrank while it was read.
        FormatError: It is a folder, a FIFO or a device.
    """
    with open_regular(path) as source:
        size = os.fstat(source.fileno()).st_size
        if size > bytes_max:
            raise LimitError("file", f"at most {bytes_max} bytes", f"{size} bytes")
        data = bytearray(size)
        filled = fill_from(source, memoryview(data))
        if filled < size or source.read(1):
            raise CacheFileError("file", f"{size} bytes, as when it was opened", "another size")
    return memoryview(data).toreadonly()


def _token_ids(path: str) -> list[int]:
    """Ids from a JSON list, or from four bytes each where the name ends in ``.u32``.

    Raises:
        PromptFileError: It is neither.
        LimitError: There are more than a position can count, or one is outside its cap.
    """
    data = _read_whole(path, _TOKEN_FILE_BYTES_MAX)
    if path.endswith(".u32"):
        if len(data) % 4:
            raise PromptFileError("tokens", "four bytes for each id", f"{len(data)} bytes")
        ids: object = list(struct.unpack(f"<{len(data) // 4}I", data))
    else:
        try:
            ids = json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise PromptFileError("tokens", "a JSON list of ids", "something else") from error
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise PromptFileError("tokens", "a JSON list of ids", "something else")
    limits.check_range("tokens", len(ids), 1, limits.POSITION_MAX, "ids")
    return ids


def _prompt(path: str) -> str:
    """The text in a UTF-8 file, as it stands.

    Raises:
        PromptFileError: It is not UTF-8.
    """
    try:
        return str(_read_whole(path, _PROMPT_FILE_BYTES_MAX), "utf-8")
    except UnicodeDecodeError as error:
        raise PromptFileError("prompt", "UTF-8 text", f"byte {error.start} is not") from error
