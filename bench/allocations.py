"""Draws what :mod:`bench.tracing.sitecustomize` wrote: memory over time, by who asked for it.

KVPACK_ALLOCATIONS=FOLDER PYTHONPATH=bench/tracing python ...
python -m bench.allocations TITLE [FROM_SECOND [FILE_OR_LINE_LEFT_OUT ...]] \\
    < FOLDER/PID.jsonl > picture.svg
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_WIDTH: Final = 1000
_CHART: Final = 680
_HEIGHT: Final = 260
_TOP: Final = 24
_LEFT: Final = 60
_SITES: Final = 9
_POINTS: Final = 240
_MIB: Final = 1 << 20
_NAMED_BYTES: Final = _MIB // 2
_OTHERS: Final = "all others"
_COLOURS: Final = (
    "#8fb8d9", "#f0c27b", "#a8d9a0", "#d9a38f", "#c7b1df", "#d9cf8f", "#8fd9cf", "#d98fb8",
    "#b0b0b0", "#e0e0e0",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """What a process held at one moment: bytes, by place, and all that is resident."""

    second: float
    resident: int
    held: dict[str, int]


def samples(lines: Iterable[str]) -> list[Sample]:
    """Those of a file, without its first line; a last one that is cut short is left out."""
    found = []
    for line in lines:
        if line.endswith("\n") and "held" in (one := json.loads(line)):
            found.append(Sample(one["s"], one["resident"], one["held"]))
    return found


def without(sample: Sample, left_out: Sequence[str]) -> Sample:
    """``sample`` but for what these lines or files asked for, beside which nothing would be seen.

    What is resident is left out, too: it cannot be told apart.
    """
    others = {
        place: size
        for place, size in sample.held.items()
        if place not in left_out and place.split(":")[0] not in left_out
    }
    return Sample(sample.second, 0 if left_out else sample.resident, others)


def thinned(taken: Sequence[Sample]) -> list[Sample]:
    """At most so many as can be seen; of neighbours the one that held the most."""
    step = max(1, -(-len(taken) // _POINTS))
    groups = [taken[at : at + step] for at in range(0, len(taken), step)]
    return [max(group, key=lambda one: sum(one.held.values())) for group in groups]


def draw(title: str, taken: Sequence[Sample]) -> str:
    """Stacked areas of what Python gave out in large pieces, and a line of what is resident."""
    base = min(sample.resident for sample in taken)
    peaks: dict[str, int] = {}
    for sample in taken:
        for place, size in sample.held.items():
            peaks[place] = max(peaks.get(place, 0), size)
    named = sorted(peaks, key=lambda place: -peaks[place])[:_SITES]
    named = [place for place in named if peaks[place] >= _NAMED_BYTES]
    shown = thinned(taken)
    most = max(max(sum(sample.held.values()), sample.resident - base) for sample in shown) or 1
    begin, end = shown[0].second, shown[-1].second

    def point(second: float, size: float) -> str:
        share = (second - begin) / (end - begin or 1.0)
        return f"{_LEFT + share * _CHART:.1f},{_TOP + _HEIGHT * (1 - size / most):.1f}"

    parts, below = [], [0] * len(shown)
    for number, place in enumerate([*named, _OTHERS]):
        above = [under + _of(one, place, named) for under, one in zip(below, shown, strict=True)]
        line = [point(one.second, size) for one, size in zip(shown, above, strict=True)]
        back = [point(one.second, size) for one, size in zip(shown, below, strict=True)][::-1]
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polygon points="{" ".join(line + back)}" fill="{colour}"/>')
        peak = max(_of(one, place, named) for one in shown) / _MIB
        top = _TOP + 14 * number
        words = html.escape(f"{place}  {peak:.1f} MiB at most")
        parts.append(
            f'<rect x="{_LEFT + _CHART + 12}" y="{top}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{_LEFT + _CHART + 26}" y="{top + 9}">{words}</text>'
        )
        below = above
    resident = " ".join(point(one.second, one.resident - base) for one in shown)
    parts.append(f'<polyline points="{resident}" fill="none" stroke="#404040"/>')
    highest = (max(one.resident for one in taken) - base) / _MIB
    note = f"line: resident, above the least, {highest:.0f} MiB at most" if base else ""
    foot = _TOP + _HEIGHT + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + 120} {foot + 8}" '
        f'font-family="sans-serif" font-size="11">'
    )
    texts = (
        f'<text x="4" y="12">{html.escape(title)}</text>'
        f'<text x="4" y="{_TOP + 10}">{most / _MIB:.0f} MiB</text>'
        f'<text x="4" y="{_TOP + _HEIGHT}">0</text>'
        f'<text x="{_LEFT}" y="{foot}">{begin:.0f} s</text>'
        f'<text x="{_LEFT + _CHART - 30}" y="{foot}">{end:.0f} s</text>'
        f'<text x="{_LEFT + _CHART + 12}" y="{foot}">{note}</text>'
    )
    return "\n".join((head, texts, *parts, "</svg>")) + "\n"


def _of(sample: Sample, place: str, named: Sequence[str]) -> int:
    if place != _OTHERS:
        return sample.held.get(place, 0)
    return sum(size for one, size in sample.held.items() if one not in named)


if __name__ == "__main__":
    begins = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    found = [without(sample, sys.argv[3:]) for sample in samples(sys.stdin)]
    found = [sample for sample in found if sample.second >= begins]
    sys.stdout.write(draw(sys.argv[1], found))
