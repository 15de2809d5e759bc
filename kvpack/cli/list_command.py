"""The command ls: what lies in a pack, or in a store."""

from __future__ import annotations

from pathlib import Path

import click

from kvpack.bundle import BundleReader
from kvpack.chunk import ChunkReference
from kvpack.cli.options import PATH, json_option, key_options, keyring_of
from kvpack.cli.output import display_name, named, say, say_json, table
from kvpack.describe import class_totals, inspect_bundle
from kvpack.keys import Keyring
from kvpack.store import ListedCut, list_cuts
from kvpack.store.places import open_place, scheme_of


@click.command(name="ls")
@key_options
@json_option
@click.argument("places", nargs=-1, required=True, metavar="PACK|STORE...", type=PATH)
def ls(
    keys: tuple[str, ...], keyrings: tuple[str, ...], as_json: bool, places: tuple[str, ...]
) -> None:
    """List the chunks of each PACK, and the cuts of each STORE. Reads no payload.

    Without a key everything shown is only a claim; with one, packs and cuts that are not authentic
    are refused or named.

    \b
    kvpack ls session.kvpack
    kvpack ls --key my.key packs
    """
    keyring = keyring_of(keys, keyrings) if keys or keyrings else None
    for place in places:
        name = display_name(place)
        if scheme_of(place) or Path(place).is_dir():
            with named(name, as_json):
                cuts = list(list_cuts(open_place(place), keyring))
            _say_cuts(name, cuts, as_json=as_json)
        else:
            with named(name, as_json):
                references = _references(place, keyring)
            _say_chunks(name, references, verified=keyring is not None, as_json=as_json)


def _references(pack: str, keyring: Keyring | None) -> tuple[ChunkReference, ...]:
    if keyring is None:
        return inspect_bundle(pack).manifest.references
    with BundleReader.open(pack, keyring) as reader:
        return reader.manifest.references


def _say_chunks(
    name: str, references: tuple[ChunkReference, ...], *, verified: bool, as_json: bool
) -> None:
    if as_json:
        for reference in references:
            say_json({"name": name, "verified": verified, **_chunk_json(reference)})
        return
    say(f"{name}: {_count(len(references), 'chunk')}{_claim(verified)}")
    head = ("class", "layers", "first", "tokens", "plain bytes", "stored bytes", "codec")
    rows = [head, *map(_chunk_row, references)]
    totals = [("total", "chunks", "plain bytes", "stored bytes")]
    totals += [
        (
            total.chunk_class.value,
            f"{total.chunks:,}",
            f"{total.plain_bytes:,}",
            f"{total.stored_bytes:,}",
        )
        for total in class_totals(references)
    ]
    for line in [*table(rows), "", *table(totals)]:
        say(line)


def _chunk_json(reference: ChunkReference) -> dict[str, object]:
    return {
        "class": reference.chunk_class.value,
        "layers": list(reference.layers),
        "first_position": reference.first_position,
        "token_count": reference.token_count,
        "part": reference.part,
        "epoch": reference.epoch,
        "codec": reference.codec.value,
        "aead": reference.aead.value,
        "plain_bytes": reference.plain_bytes,
        "stored_bytes": reference.object_bytes,
        "content_id": reference.content_id.hex(),
        "seal_id": reference.seal_id.hex(),
    }


def _chunk_row(reference: ChunkReference) -> tuple[str, ...]:
    return (
        reference.chunk_class.value,
        _layers(reference.layers),
        f"{reference.first_position:,}",
        f"{reference.token_count:,}",
        f"{reference.plain_bytes:,}",
        f"{reference.object_bytes:,}",
        reference.codec.value,
    )


def _layers(layers: tuple[int, ...]) -> str:
    if len(layers) > 3:
        return f"{layers[0]} … {layers[-1]} ({len(layers)})"
    return ",".join(map(str, layers)) or "-"


def _say_cuts(name: str, cuts: list[ListedCut], *, as_json: bool) -> None:
    if as_json:
        for cut in cuts:
            say_json({"name": name, **_cut_json(cut)})
        return
    say(f"{name}: {_count(len(cuts), 'cut')}{_claim(all(cut.verified for cut in cuts))}")
    head = ("cut", "tenant", "epoch", "tokens", "chunks", "bytes", "kept for", "state")
    if cuts:
        for line in table([head, *map(_cut_row, cuts)]):
            say(line)


def _cut_json(cut: ListedCut) -> dict[str, object]:
    return {
        "cut": cut.cut_id.hex(),
        "tenant": cut.tenant,
        "epoch": cut.epoch,
        "position": cut.position,
        "chunks": cut.chunks,
        "object_bytes": cut.object_bytes,
        "holds": [
            {"kind": hold.kind.name.lower(), "session": hold.lineage.hex(), "stamp": hold.stamp}
            for hold in cut.holds
        ],
        "verified": cut.verified,
        "problem": cut.problem,
    }


def _cut_row(cut: ListedCut) -> tuple[str, ...]:
    kinds = sorted({hold.kind.name.lower() for hold in cut.holds})
    return (
        cut.cut_id.hex()[:16],
        display_name(cut.tenant),
        str(cut.epoch),
        f"{cut.position:,}",
        f"{cut.chunks:,}",
        f"{cut.object_bytes:,}",
        ",".join(kinds) or "nobody",
        display_name(cut.problem) or ("good" if cut.verified else "not verified"),
    )


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _claim(verified: bool) -> str:
    return "" if verified else " (not verified: without the key this is only a claim)"
