"""Runs ``kvnode prove`` for the command line: dtypes, interrupts, progress, output, exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpack.errors import EXIT_FAILURE, EXIT_GOOD
from node.prove.process import COMMAND, ModelRefusedError
from node.prove.report import all_hold, as_json, show
from node.prove.result import DtypeRun
from node.prove.runner import Progress as Report
from node.prove.runner import ProveOptions, prove_dtype

#: Seconds for cases beyond the essential ones. A tiny model needs a few minutes for all of them.
BUDGET_S: Final = 600.0

#: What the command offers, and the dtypes that it means; None is the model's own.
DTYPES: Final[dict[str | None, tuple[str | None, ...]]] = {
    None: (None,),
    "f16": ("float16",),
    "bf16": ("bfloat16",),
    "all": ("float16", "bfloat16"),
}


@dataclass(frozen=True, slots=True)
class ProveRequest:
    """What the command was given."""

    model: Path
    dtype: str | None
    quick: bool
    budget_s: float
    as_json: bool
    command: Sequence[str] = COMMAND


def prove(request: ProveRequest) -> int:
    """Prove, print, and return the exit code.

    Raises:
        KvpackError: It could not be done.
        KeyboardInterrupt: It was stopped; nothing of it is left running.
    """
    with _bar(request) as bar:
        task = bar.add_task("starting", total=1.0)

        def progress(step: str, done: float) -> None:
            bar.update(task, description=step, completed=done)

        runs, left_out = asyncio.run(_interruptible(request, progress))
    if request.as_json:
        sys.stdout.write(json.dumps(as_json(runs, left_out), allow_nan=False) + "\n")
    else:
        show(runs, left_out, Console(highlight=False))
    return EXIT_GOOD if all_hold(runs) else EXIT_FAILURE


async def _all_dtypes(request: ProveRequest, progress: Report) -> tuple[list[DtypeRun], list[str]]:
    """Every dtype that was asked for. One that a backend lacks is left out of ``all``, by name."""
    dtypes = DTYPES[request.dtype]
    runs: list[DtypeRun] = []
    left_out: list[str] = []
    for dtype in dtypes:
        budget_s = request.budget_s / len(dtypes)
        options = ProveOptions(request.model, dtype, request.quick, budget_s, request.command)
        try:
            runs.append(await prove_dtype(options, progress))
        except ModelRefusedError as error:
            if len(dtypes) == 1:
                raise
            left_out.append(f"{dtype}: {error}")
    if not runs:
        # Neither half exists here: the model's own is what there is to prove.
        options = ProveOptions(
            request.model, None, request.quick, request.budget_s, request.command
        )
        runs.append(await prove_dtype(options, progress))
    return runs, left_out


async def _interruptible(
    request: ProveRequest, progress: Report
) -> tuple[list[DtypeRun], list[str]]:
    """SIGINT and SIGTERM cancel the work, so that it ends what it started."""
    task = asyncio.ensure_future(_all_dtypes(request, progress))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _bar(request: ProveRequest) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=request.as_json or not console.is_terminal,
    )
