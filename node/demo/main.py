"""Runs the demo for the command line: interrupts, progress, output, exit code."""

from __future__ import annotations

import asyncio
import dataclasses
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
from node.demo.stage import TINY_WINDOW_TOKENS, set_stage
from node.demo.text import read_text, require_window
from node.errors import UsageError
from node.shipped import TRAINED, TRAINED_WINDOW_TOKENS, require_model, trained_model


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command was given. ``window_tokens`` is one of the tiny model's.

    Raises:
        UsageError: Both a model folder and the tiny model were asked for.
    """

    text: Path | None
    tokens: int
    window_tokens: int | None
    out: Path
    model: Path | None
    tiny: bool
    source: str
    target: str
    keep: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.model is not None and self.wants_tiny:
            raise UsageError("--model: not together with --tiny or --window")

    @property
    def wants_tiny(self) -> bool:
        """Whether the tiny random model was asked for; a window is asked of no other."""
        return self.tiny or self.window_tokens is not None


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """What the demo runs on.

    Attributes:
        folder: None for a tiny model, to be made.
        window_tokens: None where only the loaded model can say.
        note: What the user should know of the choice; mostly nothing.
    """

    folder: Path | None
    window_tokens: int | None
    note: str = ""


def choose_model(options: DemoOptions, trained: Path | None) -> ChosenModel:
    """The model asked for; else the trained one; else, where that is not there, a tiny one.

    Raises:
        ModelFolderError: A file is missing in the folder.
    """
    if options.model is not None:
        return ChosenModel(require_model(options.model), None)
    asked = options.window_tokens
    tiny = ChosenModel(None, TINY_WINDOW_TOKENS if asked is None else asked)
    if options.wants_tiny:
        return tiny
    if trained is None:
        note = f"the trained model {TRAINED} is not installed; using a tiny random one"
        return dataclasses.replace(tiny, note=note)
    return ChosenModel(require_model(trained), TRAINED_WINDOW_TOKENS)


def demo(options: DemoOptions) -> int:
    """Run the demo; returns the exit code.

    Raises:
        KvpackError: It could not be run.
        KeyboardInterrupt: It was stopped; nothing of it is left running.
    """
    addresses = [str(Address.parse(one)) for one in (options.source, options.target)]
    chosen = choose_model(options, trained_model())
    text = read_text(options.text)
    if chosen.window_tokens is not None:
        check_tokens(options.tokens, chosen.window_tokens)
        # A token stands for at least one byte: a text of fewer bytes cannot be long enough.
        length = len(text.text.encode())
        require_window(text, length, chosen.window_tokens, "bytes")
    if chosen.note:
        sys.stderr.write(f"kvnode: note: {chosen.note}\n")
    stage = set_stage(options.out, chosen.folder, chosen.window_tokens)
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
