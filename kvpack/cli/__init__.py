"""The ``kvpack`` command. All failures end here, so each has one exit code and one form."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from kvpack.cli import output
from kvpack.cli.commands import kvpack
from kvpack.cli.diff_command import diff
from kvpack.cli.exchange_commands import export_pack, import_pack
from kvpack.cli.list_command import ls
from kvpack.cli.place_commands import store
from kvpack.cli.sign_command import sign
from kvpack.cli.store_commands import check, gc
from kvpack.cli.verify_command import verify
from kvpack.errors import EXIT_FAILURE, EXIT_GOOD, EXIT_INTERRUPTED, EXIT_USAGE, KvpackError

__all__ = ["main"]

for _command in (verify, sign, ls, check, gc, diff, import_pack, export_pack, store):
    kvpack.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    Args:
        arguments: What follows the program's name; None takes the process's own.
    """
    # A name that the terminal cannot show must not turn a verdict into a crash.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = kvpack.main(args=arguments, prog_name="kvpack", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.UsageError as error:
        return _usage(error)
    except (click.Abort, KeyboardInterrupt):
        output.say_error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except output.NamedError as error:
        if error.wants_json:
            output.say_json(error.as_json())
        output.fail(error.error, error.name)
        return output.exit_code_of(error.error)
    except (KvpackError, OSError) as error:
        output.fail(error)
        return output.exit_code_of(error)
    return code if isinstance(code, int) else EXIT_GOOD


def _usage(error: click.UsageError) -> int:
    output.say_error(error.format_message())
    command = error.ctx.command_path if error.ctx is not None else "kvpack"
    output.say_hint(f"{command} --help shows how it is used")
    return EXIT_USAGE
