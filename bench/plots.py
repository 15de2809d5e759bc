"""``python -m bench.plots JSON PNG``: how cost grows, drawn with both axes logarithmic."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.growth import Series, series_of
from bench.measured import Contender


def draw(series: list[Series], path: Path) -> None:
    """One panel for each thing that grows; a dashed line is linear growth.

    Raises:
        ImportError: There is no matplotlib.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    axes = sorted({one.axis for one in series})
    figure, panels = pyplot.subplots(1, len(axes), figsize=(5.5 * len(axes), 4), squeeze=False)
    for axis, panel in zip(axes, panels[0], strict=True):
        shown = [one for one in series if one.axis == axis]
        for one in shown:
            sizes, seconds = zip(*one.points, strict=True)
            panel.loglog(sizes, seconds, marker="o", label=f"{one.name}: slope {one.slope:.2f}")
        size, seconds = max(shown, key=lambda one: one.points[-1][1]).points[0]
        last = max(one.points[-1][0] for one in shown)
        panel.loglog([size, last], [seconds, seconds * last / size], "k--", linewidth=0.8)
        panel.set_xlabel(axis)
        panel.set_ylabel("seconds")
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    """Parse, read, draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    options = parser.parse_args()
    try:
        found = json.loads(options.json.read_text())
        groups = found["groups"].values()
        series = series_of(Contender.of(one) for group in groups for one in group["contenders"])
        if not series:
            raise ValueError("nothing was measured at two sizes")
        draw(series, options.png)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        sys.stderr.write(f"bench: error: {type(error).__name__}: {error}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
