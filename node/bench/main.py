"""Runs the bench for the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from kvpack.errors import EXIT_FAILURE, EXIT_GOOD
from kvpack.layout import CacheLayout
from node.bench.loopback import measure_loopback
from node.bench.measure import measure
from node.bench.model import MadeModel
from node.bench.order import BenchOrder, OtherEnd, row_source
from node.bench.report import as_page, as_values
from node.bench.serve import bench_fitting
from node.config import ServeConfig
from node.daemon import serve


def bench_move(order: BenchOrder, other: OtherEnd | None, *, as_json: bool) -> int:
    """Measure, against ``other`` or between two children of this process, and print.

    Returns:
        The exit code: not 0 where a row that was installed is not the one that was sent.

    Raises:
        KvpackError: It could not be measured.
    """
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    values = asyncio.run(measure_loopback(order) if other is None else _to(order, other))
    sys.stdout.write((json.dumps(values) if as_json else as_page(values)) + "\n")
    return EXIT_GOOD if values["installed_equal"] else EXIT_FAILURE


def bench_serve(
    config: ServeConfig,
    layout_name: str,
    layout: CacheLayout,
    *,
    spools: bool,
    rows: Path | None,
    stop_on_stdin_end: bool,
) -> None:
    """Be the other end until told to stop.

    Raises:
        KvpackError: The node could not be started.
    """
    model = MadeModel(layout_name, layout, row_source(layout, rows))
    fitting = bench_fitting(model, config, takes=True, spools=spools)
    serve(config, stop_on_stdin_end=stop_on_stdin_end, fitting=fitting)


async def _to(order: BenchOrder, other: OtherEnd) -> dict[str, Any]:
    return as_values(await measure(order, other))
