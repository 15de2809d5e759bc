"""The command diff: where do two packs differ?"""

from __future__ import annotations

import click

from kvpack.bundle import BundleReader
from kvpack.cli.options import PATH, json_option, key_options, keyring_of, require_keys
from kvpack.cli.output import display_name, named, say, say_json
from kvpack.diff import Difference, FieldDifference, compare_packs
from kvpack.errors import EXIT_FAILURE, EXIT_GOOD


@click.command(name="diff")
@key_options
@json_option
@click.argument("first", metavar="A", type=PATH)
@click.argument("second", metavar="B", type=PATH)
@click.pass_context
def diff(
    context: click.Context,
    keys: tuple[str, ...],
    keyrings: tuple[str, ...],
    as_json: bool,
    first: str,
    second: str,
) -> None:
    """Say where the packs A and B differ first: field, layer, position. Never what is there.

    Payload is compared where both hold it. Exits with 0 where they agree, 1 where they do not.

    \b
    kvpack diff --key my.key a.kvpack b.kvpack
    """
    require_keys(context, keys, keyrings)
    names = display_name(first), display_name(second)
    with named(names[0], as_json):
        keyring = keyring_of(keys, keyrings)
        one = BundleReader.open(first, keyring)
    with one, named(names[1], as_json), BundleReader.open(second, keyring) as other:
        found = list(compare_packs(one, other))
    if as_json:
        for difference in found:
            say_json(_json(difference))
        say_json({"first": names[0], "second": names[1], "same": not found})
    elif not found:
        say(f"{names[0]}, {names[1]}: the same")
    else:
        for difference in found:
            say(_line(difference))
    context.exit(EXIT_FAILURE if found else EXIT_GOOD)


def _json(difference: Difference) -> dict[str, object]:
    if isinstance(difference, FieldDifference):
        return {
            "field": difference.field,
            "first": difference.first,
            "second": difference.second,
        }
    return {
        "class": difference.chunk_class.value,
        "position": difference.position,
        "layer": difference.layer,
        "role": difference.role or None,
    }


def _line(difference: Difference) -> str:
    if isinstance(difference, FieldDifference):
        sides = f"{difference.first} and {difference.second}"
        return display_name(f"{difference.field}: {sides}")
    what = difference.chunk_class.value
    where = f"position {difference.position:,}"
    if difference.layer is None:
        return f"{what}: first at {where}"
    return f"{what}: first at {where}, layer {difference.layer}, {difference.role} row"
