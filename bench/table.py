"""``python -m bench.table JSON``: the tables of a run, for people; into a page with ``--into``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.growth import series_of
from bench.measured import (
    MEASURED,
    NOT_THERE_YET,
    Contender,
    Spread,
    alien_cores,
    cpu_ratios,
    speed_ratios,
)
from bench.verdict import verdict
from bench.wanted import WANTED, Kind, Wanted

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

#: Instead of a ratio: a sample over itself is 1 on any machine, and decides nothing.
SAME = "off by rule: the same"

_Groups = Mapping[str, Mapping[str, Contender]]


def as_page(found: Mapping[str, Any]) -> str:
    """Markdown of one run: the machine, what is wanted, and every contender."""
    groups = {
        name: {one["name"]: Contender.of(one) for one in group["contenders"]}
        for name, group in found["groups"].items()
    }
    lines = [*_machine(found), "", *_wanted(groups), ""]
    for name, contenders in groups.items():
        lines += [*_group(name, found["groups"][name], contenders), ""]
    lines += _growth(one for contenders in groups.values() for one in contenders.values())
    return "\n".join(lines).rstrip()


def _machine(found: Mapping[str, Any]) -> Iterator[str]:
    machine = found["machine"]
    if found["quick"]:
        yield "**A quick look at small payloads: not figures to go by.**\n"
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['system']}, Python {machine['python']} ({machine['openssl']}), TCP "
        f"{machine['tcp_congestion_control'] or 'unknown'}; {versions}. Taken {found['began']} in "
        f"{found['seconds']:.0f} s. Figures are medians, with the range (lowest to highest), over "
        "the n rounds that each had; those of a table took turns in a round, but who did not fit "
        "the time, or is done less often, has fewer. Ratios are of the rounds that both had. A "
        "verdict is not given where rounds lie too far apart, are under three, or others used the "
        "machine."
    )


def judged(wanted: Wanted, groups: _Groups) -> tuple[str, str, str]:
    """What was found for a row, the word for its bound, and the word for its aim."""
    group = groups.get(wanted.group, {})
    names = (wanted.ours, *wanted.against)
    missing = [group.get(name) for name in names]
    for name, one in zip(names, missing, strict=True):
        if one is None:
            return "", NOT_THERE_YET if group else "not run", ""
        if one.status != MEASURED:
            who = "" if name == wanted.ours else f"{one.title}: "
            return "", f"{who}{one.status}: {one.reason}", ""
    ours, *others = (group[name] for name in names)
    if _same(ours, others):
        return SAME, "", ""
    values = _values(wanted, ours, others)
    spread = Spread.of(values)
    if spread is None:
        return "", NOT_THERE_YET, ""
    alien = alien_cores([ours, *others])
    words = [
        verdict(values, bound, at_least=wanted.kind.at_least, alien=alien)
        for bound in (wanted.must, wanted.aim)
        if bound is not None
    ]
    busy = "" if alien is None else f", {alien:.2f} cores taken by others"
    return f"{spread.text()}{busy}", words[0], words[1] if words[1:] else ""


def _same(ours: Contender, others: list[Contender]) -> bool:
    """Whether ours are the other's samples: zstd as the rule chose, where it chose raw."""
    return bool(ours.samples) and [ours.samples] == [other.samples for other in others]


def _values(wanted: Wanted, ours: Contender, others: list[Contender]) -> list[float]:
    if wanted.kind is Kind.MILLISECONDS:
        return [1e3 * sample.seconds for sample in ours.samples]
    if wanted.kind is Kind.CPU:
        return cpu_ratios(ours, others[0])
    ratios = speed_ratios(ours, others)
    return [1 / ratio for ratio in ratios] if wanted.kind is Kind.TIME else ratios


def _wanted(groups: _Groups) -> Iterator[str]:
    yield "| what | must | aim | found | must be | aim |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in WANTED:
        sign = ">=" if row.kind.at_least else "<="
        found, word, aim = judged(row, groups)
        aimed = "" if row.aim is None else f"{sign} {row.aim:g}"
        yield f"| {row.what} | {sign} {row.must:g} | {aimed} | {found} | {word} | {aim} |"


def _group(
    name: str, group: Mapping[str, Any], contenders: Mapping[str, Contender]
) -> Iterator[str]:
    yield (
        f"**{name}**: {group['seconds']:.0f} s, load {group['load_before']} before and "
        f"{group['load_after']} after"
        + (f"; {group['status']}: {group['reason']}" if group["reason"] else "")
    )
    yield ""
    columns = "seconds | GB/s | against | speed over it | CPU s/GB | others' cores"
    yield f"| what | protects | {columns} |"
    yield "| --- | --- | --- | ---: | --- | --- | ---: | ---: |"
    for one in contenders.values():
        if one.status != MEASURED:
            yield f"| {one.title} | {one.protects} | {one.status}: {one.reason} | | | | | |"
            continue
        yield _row(one, contenders)


def _row(one: Contender, contenders: Mapping[str, Contender]) -> str:
    taken = Spread.of(sample.seconds for sample in one.samples)
    if taken is None:
        return f"| {one.title} | {one.protects} | no round | | | | | |"
    seconds = taken.text(3 if taken.median >= 0.01 else 6)
    has_bytes = all(sample.byte_count for sample in one.samples)
    speed = Spread.of(sample.speed / 1e9 for sample in one.samples) if has_bytes else None
    cpu = Spread.of(
        1e9 * sample.cpu_s / sample.byte_count
        for sample in one.samples
        if sample.cpu_s is not None and sample.byte_count
    )
    other = contenders.get(one.against)
    ratio = ""
    if other is not None:
        found = Spread.of(speed_ratios(one, [other]))
        ratio = SAME if _same(one, [other]) else "" if found is None else found.text()
    alien = alien_cores([one])
    cells = (
        one.title,
        one.protects,
        seconds,
        "" if speed is None else f"{speed.median:.2f}",
        "" if other is None else other.title,
        ratio,
        "" if cpu is None else f"{cpu.median:.2f}",
        "" if alien is None else f"{alien:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def _growth(contenders: Iterable[Contender]) -> Iterator[str]:
    series = series_of(contenders)
    if not series:
        return
    yield "| cost | grows with | sizes | slope of the fit | steepest step | |"
    yield "| --- | --- | --- | ---: | ---: | --- |"
    for one in series:
        sizes = f"{one.points[0][0]:,} to {one.points[-1][0]:,}"
        yield (
            f"| {one.name} | {one.axis} | {sizes} | {one.slope:.2f} | {one.steepest:.2f} | "
            f"{one.word} |"
        )


def put_between(page: str, made: str) -> str:
    """The page with what stands between the marker lines replaced.

    Raises:
        ValueError: It does not have both of them, once, in order.
    """
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end or BEGIN in after:
        raise ValueError(f"expected one line {BEGIN} and then one line {END}")
    return f"{before}{BEGIN}\n{made}\n{END}\n{after}"


def main() -> None:
    """Parse, read, print or put."""
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--into", type=Path, help="a page with the marker lines")
    options = parser.parse_args()
    try:
        made = as_page(json.loads(options.json.read_text()))
        if options.into is None:
            print(made)
            return
        options.into.write_text(put_between(options.into.read_text(), made))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"bench: error: {type(error).__name__}: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
