"""The group store: can a place be trusted with packs, and a link to a pack that lies there."""

from __future__ import annotations

from typing import Final

import click

from kvpack.cli.options import PATH, json_option
from kvpack.cli.output import display_name, named, say, say_hint, say_json
from kvpack.store.places import link_to, probe_place

#: What S3 allows a signed link at most: 7 days.
_LINK_S_MAX: Final = 604_800


@click.group(name="store")
def store() -> None:
    """Ask about places of packs: folders, and buckets (s3://BUCKET/PREFIX)."""


@store.command(name="check")
@json_option
@click.argument("place", metavar="STORE", type=PATH)
def check_place(as_json: bool, place: str) -> None:
    """Try whether STORE keeps the promises that packs rely on. Leaves nothing behind.

    One name is created twice, and then by eight at once, three times: exactly one may win. What was
    created must be read, listed and gone after it was deleted, and the store's clock must be near
    ours. A bucket need not hold a store yet. Whether the packs in it are whole says kvpack check.

    \b
    kvpack store check s3://bucket/packs
    """
    name = display_name(place)
    with named(name, as_json):
        report = probe_place(place)
    effort = report.effort
    if as_json:
        say_json(
            {
                "name": name,
                "ok": True,
                "racers": effort.racers,
                "rounds": effort.rounds,
                "clock_skew_s": round(report.skew_s, 3),
            }
        )
        return
    say(
        f"{name}: OK: of {effort.racers} creates of one name at once one won, "
        f"{effort.rounds} times; clock {report.skew_s:+.0f} s"
    )


@store.command(name="link")
@click.option(
    "--expires",
    default=3600,
    show_default=True,
    type=click.IntRange(1, _LINK_S_MAX),
    metavar="SECONDS",
    help="How long it works.",
)
@json_option
@click.argument("pack", metavar="PACK", type=PATH)
def link(expires: int, as_json: bool, pack: str) -> None:
    """Print a link by which anybody can read PACK, an object in a bucket, for a while.

    Without the tenant's key whoever reads it learns sizes and positions, and nothing else.

    \b
    kvpack store link --expires 600 s3://bucket/session.kvpack
    """
    name = display_name(pack)
    with named(name, as_json):
        url = link_to(pack, expires)
    if as_json:
        say_json({"name": name, "url": url, "expires_s": expires})
        return
    say(url)
    say_hint("whoever has this link can read the pack until then")
