"""``kvnode``: everything that runs a model or a socket. Heavy imports are inside the commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, NoReturn

import click

import kvpack
from kvpack.errors import EXIT_FAILURE, EXIT_INTERRUPTED, KvpackError
from node.cli_apikey import apikey
from node.cli_bench import bench
from node.cli_directory import directory
from node.cli_economics import economics
from node.cli_pair import pair
from node.cli_placement import drain, rebalance
from node.cli_produce import produce
from node.cli_serve import serve
from node.cli_session import migrate, session
from node.cli_trust import enroll, pin, pins, unpin
from node.config import prepare_process
from node.errors import exit_code_of

_FOLDER: Final = click.Path(path_type=Path, file_okay=False)
_FILE: Final = click.Path(path_type=Path)
_SECONDS: Final = click.FloatRange(1.0, 86_400.0)

#: Characters of a file's name in an error.
_NAME_SHOWN: Final = 120


class _Commands(click.Group):
    """Turns errors into one line on standard error and the exit code of their kind."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KvpackError as error:
            _fail(str(error), exit_code_of(error))
        except (KeyboardInterrupt, click.Abort):
            _fail("interrupted", EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Whoever read our output has left: click ends without a word.
            raise
        except OSError as error:
            # A name that no file can have, or a folder that cannot be looked into.
            why = error.strerror or type(error).__name__
            where = str(error.filename or "")[:_NAME_SHOWN]
            _fail(f"{where}: {why}" if where else why, EXIT_FAILURE)


def _fail(message: str, exit_code: int) -> NoReturn:
    line = _on_terminal(" ".join(message.split()))
    sys.stderr.write(f"kvnode: error: {line}\n")
    raise SystemExit(exit_code)


def _on_terminal(line: str) -> str:
    """``line`` without what could steer a terminal: another machine's words may stand in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvpack.__version__, prog_name="kvnode")
def main() -> None:
    """Runs models, holds sessions and moves them between nodes, bit for bit."""
    prepare_process()


@main.group()
def model() -> None:
    """Model folders."""


@model.command()
@click.option(
    "--arch",
    required=True,
    metavar="NAME",
    help="muse_glimmer, cohere2, exaone4, afmoe, gemma3, gemma3_text, gpt_oss, olmo3, llama",
)
@click.option("--out", required=True, type=_FOLDER, help="Folder to make.")
@click.option("--seed", required=True, type=int, help="Equal seeds give equal weights.")
@click.option("--window", default=64, show_default=True, help="Sliding window in tokens.")
@click.option("--layers", default=8, show_default=True, help="Layers in all.")
def tiny(arch: str, out: Path, seed: int, window: int, layers: int) -> None:
    """Make a tiny random model that mlx_lm loads, too."""
    from node.tiny import make_tiny_model

    make_tiny_model(out, arch, seed=seed, window=window, layers=layers)
    click.echo(str(out))


for _command in (enroll, pair, pin, pins, unpin):
    main.add_command(_command)


@main.command()
@click.option("--text", type=_FILE, help="Text to prefill; default: the project's own.")
@click.option("--tokens", default=2048, show_default=True, help="Tokens of it to use.")
@click.option("--tiny", is_flag=True, help="Use a tiny random model, not the trained one.")
@click.option("--window", type=int, help="Window of the tiny model (64); implies --tiny.")
@click.option("--out", type=_FOLDER, default=Path("demo-out"), show_default=True)
@click.option("--model", "model_dir", type=_FOLDER, help="Use this model folder instead.")
@click.option("--source", default="127.0.0.1:0", show_default=True, metavar="HOST:PORT")
@click.option("--target", default="127.0.0.1:0", show_default=True, metavar="HOST:PORT")
@click.option("--keep", is_flag=True, help="Keep model, credentials, logs and node data, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def demo(
    text: Path | None,
    tokens: int,
    tiny: bool,
    window: int | None,
    out: Path,
    model_dir: Path | None,
    source: str,
    target: str,
    keep: bool,
    as_json: bool,
) -> None:
    """Move a session between two processes on this machine, and prove it.

    Prefills a text on one node, hands the session to another, compares further logits with
    a twin that never moved, saves and verifies a pack. Leaves the pack and its key in --out.
    Exits with 1 if anything did not hold.
    """
    from node.demo.main import DemoOptions
    from node.demo.main import demo as run

    options = DemoOptions(text, tokens, window, out, model_dir, tiny, source, target, keep, as_json)
    raise SystemExit(run(options))


@main.command()
@click.option("--model", "model_dir", required=True, type=_FOLDER, help="Model folder.")
@click.option("--dtype", type=click.Choice(["f16", "bf16", "all"]), help="Default: its own.")
@click.option("--quick", is_flag=True, help="A short list of cases.")
@click.option("--budget", default=600.0, show_default=True, metavar="SECONDS", type=_SECONDS)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def prove(model_dir: Path, dtype: str | None, quick: bool, budget: float, as_json: bool) -> None:
    """Show what this machine keeps of the promise, with this model.

    Cuts sessions around every edge of the rings, restores them in a fresh process in every
    way there is, and compares logits and rows bit for bit with sessions that never moved. Ends
    with one line for a bug report. Exits with 1 if anything that is promised did not hold.
    """
    from node.prove.main import ProveRequest
    from node.prove.main import prove as run

    raise SystemExit(run(ProveRequest(model_dir, dtype, quick, budget, as_json)))


main.add_command(serve)
main.add_command(apikey)
main.add_command(bench)
main.add_command(directory)
main.add_command(drain)
main.add_command(economics)
main.add_command(migrate)
main.add_command(produce)
main.add_command(rebalance)
main.add_command(session)
