"""The two memory curves as an SVG that stretches: rings stay flat, rows of full layers grow.

Only lines are in the SVG, and none gets wider when it is stretched; numbers stand beside it as
text, so they are as large on a telephone as on a screen.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Final

from node.metrics.memory import MemoryShape
from node.page.units import bytes_text, count_text, plural, tick_text

#: Parts of each axis.
TICKS: Final = 4

#: Empty room beyond the longest session, and the least that is shown: some windows.
ROOM: Final = 1.1
WINDOWS_SHOWN: Final = 4


@dataclass(frozen=True, slots=True)
class Axes:
    """What the corners of the plot stand for: ``tokens`` to the right, ``size`` bytes up."""

    tokens: int
    size: int

    def x(self, tokens: float) -> str:
        """A length as a coordinate of 0 to 100."""
        return f"{100 * tokens / self.tokens:.2f}"

    def y(self, size: float) -> str:
        """A size as a coordinate, which counts downwards."""
        return f"{100 - 100 * size / self.size:.2f}"

    def at(self, tokens: float, size: float) -> str:
        """Both."""
        return f"{self.x(tokens)} {self.y(size)}"


def axes_for(shape: MemoryShape, positions: list[int]) -> Axes:
    """Axes that hold every session, with ticks at powers of two."""
    windows = [window for window, _ in shape.windows]
    wanted = max([*(round(ROOM * n) for n in positions), WINDOWS_SHOWN * max(windows, default=256)])
    tokens = TICKS * _power_of_two(min(wanted, shape.context_tokens) / TICKS)
    most = max(shape.ring_bytes(tokens), shape.full_bytes(tokens), 1)
    return Axes(tokens, TICKS * _power_of_two(most / TICKS))


def memory_plot(shape: MemoryShape, positions: list[int]) -> str:
    """The figure: curves, one pair of dots for each length in ``positions``, and the legend."""
    axes = axes_for(shape, positions)
    words = html.escape(_words(shape, positions))
    ticks = [axes.size * i // TICKS for i in range(TICKS, -1, -1)]
    up = "".join(f"<span>{tick_text(tick, axes.size)}</span>" for tick in ticks)
    along = "".join(
        f"<span>{count_text(axes.tokens * i // TICKS)}</span>" for i in range(1, TICKS + 1)
    )
    return (
        f'<div class="plot"><div class="plot-y" aria-hidden="true">{up}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f"{_grid()}{_curves(shape, axes)}{_dots(shape, axes, positions)}</svg>"
        f'<div class="plot-x" aria-hidden="true">{along}</div>'
        '<p class="plot-unit" aria-hidden="true">tokens in one session</p></div>'
        f"{_legend(shape, positions)}"
    )


def _grid() -> str:
    lines = "".join(f'<path class="grid" d="M0 {100 * i // TICKS}H100"/>' for i in range(TICKS))
    return f'{lines}<path class="axis" d="M0 100H100"/>'


def _curves(shape: MemoryShape, axes: Axes) -> str:
    bends = [window for window, _ in shape.windows if window < axes.tokens]
    ring = [(n, shape.ring_bytes(n)) for n in (0, *bends, axes.tokens)]
    full = [(0, 0), (axes.tokens, shape.full_bytes(axes.tokens))]
    drawn = ""
    for name, points in (("full", full), ("ring", ring)):
        line = "L".join(axes.at(n, size) for n, size in points)
        drawn += f'<path class="area {name}" d="M{line}V100H0Z"/>'
        drawn += f'<path class="curve {name}" d="M{line}"/>'
    return drawn


def _dots(shape: MemoryShape, axes: Axes, positions: list[int]) -> str:
    """Lines without length: their round ends stay round however the SVG is stretched."""
    dots = ""
    for position in sorted(set(positions)):
        for name, size in (
            ("full", shape.full_bytes(position)), ("ring", shape.ring_bytes(position)),
        ):  # fmt: skip
            title = f"{count_text(position)} tokens: {bytes_text(size)}"
            spot = axes.at(position, size)
            dots += f'<path class="dot {name}" d="M{spot}h0"><title>{title}</title></path>'
    return dots


def _legend(shape: MemoryShape, positions: list[int]) -> str:
    rows = []
    if shape.windows:
        bend = count_text(shape.windows[-1][0])
        flat = bytes_text(shape.ring_bytes(shape.windows[-1][0]))
        rows.append(
            ("ring", f"Rings of {plural(shape.window_layers, 'window layer')}",
             f"flat at {flat} from {bend} tokens on")
        )  # fmt: skip
    if shape.full_layers:
        kind = "NoPE layer" if shape.full_is_nope else "full layer"
        rows.append(
            ("full", f"Rows of {plural(shape.full_layers, kind)}",
             f"{bytes_text(shape.full_row_bytes)} more with each token")
        )  # fmt: skip
    legend = "".join(
        f'<li><i class="swatch {name}"></i><b>{what}</b> <span>{how}</span></li>'
        for name, what, how in rows
    )
    held = _held(shape, positions)
    return f'<ul class="legend">{legend}</ul><p class="note">{held}</p>'


def _held(shape: MemoryShape, positions: list[int]) -> str:
    if not positions:
        return "Nothing is held now. Each session that is held gets a dot on both lines."
    rings = bytes_text(sum(shape.ring_bytes(n) for n in positions))
    full = bytes_text(sum(shape.full_bytes(n) for n in positions))
    held = plural(len(positions), "session or slot", "sessions and slots")
    verb = "holds" if len(positions) == 1 else "hold"
    return f"Now {held} {verb} {rings} in rings and {full} in rows that grow: the dots."


def _words(shape: MemoryShape, positions: list[int]) -> str:
    longest = max(positions, default=shape.context_tokens)
    return (
        f"Memory of one session by its length. At {count_text(longest)} tokens the rings take "
        f"{bytes_text(shape.ring_bytes(longest))} and the rows that grow "
        f"{bytes_text(shape.full_bytes(longest))}."
    )


def _power_of_two(least: float) -> int:
    power = 1
    while power < least:
        power *= 2
    return power
