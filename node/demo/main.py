"""Runs the demo for the command line: interrupts, progress, output, exit code."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpack.errors import EXIT_FAILURE, EXIT_GOOD
from node.config import Address
from node.demo.report import as_json, show
from node.demo.run import DemoResult, check_tokens, failures, run_demo
from node.demo.stage import set_stage
from node.demo.text import read_text, require_window


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command was given."""

    text: Path | None
    tokens: int
    window_tokens: int
    out: Path
    model: Path | None
    source: str
    target: str
    keep: bool
    as_json: bool


def demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code.

    Raises:
        KvpackError: It could not be run.
        KeyboardInterrupt: It was stopped; nothing of it is left running.
    """
    addresses = [str(Address.parse(one)) for one in (options.source, options.target)]
    text = read_text(options.text)
    if options.model is None:
        check_tokens(options.tokens, options.window_tokens)
        # A token stands for at least one byte: a text of fewer bytes cannot be long enough.
        length = len(text.text.encode())
        require_window(text, length, options.window_tokens, "bytes")
    stage = set_stage(options.out, options.model, options.window_tokens)
    try:
        with _bar(options) as bar:
            task = bar.add_task("starting", total=1.0)

            def progress(step: str, done: float) -> None:
                bar.update(task, description=step, completed=done)

            result = asyncio.run(
                _interruptible(run_demo(stage, text, options.tokens, addresses, progress))
            )
    finally:
        if not options.keep:
            stage.remove_work()
    if options.as_json:
        sys.stdout.write(json.dumps(as_json(result)) + "\n")
    else:
        show(result, Console(highlight=False))
    return EXIT_FAILURE if failures(result) else EXIT_GOOD


def _bar(options: DemoOptions) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=options.as_json or not console.is_terminal,
    )


async def _interruptible(work: object) -> DemoResult:
    """Await ``work``; SIGINT and SIGTERM cancel it, so that it ends what it started."""
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        result: DemoResult = await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    return result
