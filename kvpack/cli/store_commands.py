"""The commands check and gc: is a store whole, and what in it can go?"""

from __future__ import annotations

import secrets
import time
from collections import Counter

import click

from kvpack.cli import output
from kvpack.cli.options import PATH, json_option, key_options, keyring_of, require_keys
from kvpack.cli.output import display_name, named, say, say_json
from kvpack.cli.progress import OBJECTS, Progress
from kvpack.errors import EXIT_DAMAGE, EXIT_GOOD
from kvpack.store import (
    BUDGET_BYTES,
    Budget,
    Finding,
    GcPlan,
    GcPolicy,
    GcResult,
    Severity,
    ToldStore,
    apply_gc,
    check_store,
    plan_gc,
)
from kvpack.store.places import open_place

#: How long a collector waits before it asks again for what a writer has in hand.
_PAUSE_S = 0.05


def pause() -> None:
    """Wait for a moment: somebody else is at work. Whoever calls bounds how often."""
    time.sleep(_PAUSE_S)


@click.command(name="check")
@key_options
@click.option("--deep", is_flag=True, help="Recompute every content id as well.")
@json_option
@click.argument("store", metavar="STORE", type=PATH)
@click.pass_context
def check(
    context: click.Context,
    keys: tuple[str, ...],
    keyrings: tuple[str, ...],
    deep: bool,
    as_json: bool,
    store: str,
) -> None:
    """Open every chunk that a cut of STORE names, and report what is wrong. Changes nothing.

    STORE is a folder, or s3://BUCKET/PREFIX. Whether a bucket's service can be trusted with packs
    at all says kvpack store check.

    Exits with 13 where a cut cannot be restored as it was saved. Notes are about leftovers and
    other tenants' cuts: nothing is lost.

    \b
    kvpack check --key my.key packs
    """
    require_keys(context, keys, keyrings)
    name = display_name(store)
    with named(name, as_json):
        held = keyring_of(keys, keyrings)
        opened = open_place(store)
        with Progress("checking", 0) as progress:
            counts = Counter(
                _tell(finding, as_json)
                for finding in check_store(opened, held, deep=deep, progress=progress.advance)
            )
    damaged, notes = counts[Severity.DAMAGE], counts[Severity.NOTE]
    if as_json:
        say_json({"name": name, "ok": not damaged, "damage": damaged, "notes": notes})
    elif not damaged:
        say(f"{name}: OK")
    if damaged:
        output.say_hint("the other cuts are good; import the damaged ones again from their packs")
    context.exit(EXIT_DAMAGE if damaged else EXIT_GOOD)


def _tell(finding: Finding, as_json: bool) -> Severity:
    """Say at once what was found: a large store takes minutes, and nothing of it is kept."""
    if as_json:
        say_json(_finding_json(finding))
    elif finding.severity is Severity.NOTE:
        say(_finding_line(finding))
    if finding.severity is Severity.DAMAGE:
        output.say_error(_finding_line(finding))
    return finding.severity


def _finding_json(finding: Finding) -> dict[str, object]:
    return {
        "severity": finding.severity.value,
        "name": finding.name,
        "reason": finding.reason,
        "detail": finding.detail,
    }


def _finding_line(finding: Finding) -> str:
    line = f"{finding.severity.value}: {finding.name}: {finding.reason} ({finding.detail})"
    return output.display_name(line)


@click.command(name="gc")
@click.option("--yes", is_flag=True, help="Do it. Without this only the plan is shown.")
@click.option(
    "--budget",
    default=BUDGET_BYTES,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="BYTES",
    help="How much the store may keep.",
)
@json_option
@click.argument("store", metavar="STORE", type=PATH)
def gc(yes: bool, budget: int, as_json: bool, store: str) -> None:
    """Say what in STORE nobody needs any more; with --yes, delete it.

    Needs no key. What a cut or a writer at work relies on is kept, also when it appears while this
    runs: the plan is asked again before every deletion.

    \b
    kvpack gc packs
    kvpack gc --yes --budget 10000000000 packs
    """
    name = display_name(store)
    result = None
    with named(name, as_json):
        opened = open_place(store)
        with Progress("planning", 0, unit=OBJECTS) as progress:
            watched = ToldStore(opened, progress.advance)
            plan = plan_gc(watched, int(time.time()), GcPolicy(Budget(bytes_max=budget)))
        if yes:
            with Progress("collecting", 0, unit=OBJECTS) as progress:
                watched = ToldStore(opened, progress.advance)
                result = apply_gc(watched, plan, int(time.time()), secrets.token_bytes(16), pause)
    if as_json:
        say_json({"name": name, **_plan_json(plan), "applied": _result_json(result)})
        return
    for line in plan.lines():
        say(line)
    if result is None:
        say(f"{name}: nothing was changed; --yes does it")
        return
    spared = f", spared {result.spared} that are in use by now" if result.spared else ""
    say(f"{name}: deleted {result.deleted} object(s), freed {result.freed_bytes:,} bytes{spared}")


def _plan_json(plan: GcPlan) -> dict[str, object]:
    return {
        "drops": [{"hold": drop.hold.name, "why": drop.why.name.lower()} for drop in plan.drops],
        "garbage": [item.name for item in plan.garbage],
        "leftovers": [item.name for item in plan.leftovers],
        "closed": [writer.hex() for writer in plan.closed],
        "kept_bytes": plan.kept_bytes,
        "freed_bytes": plan.freed_bytes,
        "excess_bytes": plan.excess_bytes,
    }


def _result_json(result: GcResult | None) -> dict[str, int] | None:
    if result is None:
        return None
    return {
        "deleted": result.deleted,
        "spared": result.spared,
        "freed_bytes": result.freed_bytes,
        "leftovers": result.leftovers,
        "closed": result.closed,
    }
