"""Options of ``mlx_lm.server`` that mean nothing here, or that cannot be kept: said by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from node.errors import UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: They change no answer: taken, so that command lines go on working, and said to be of no use.
_NUMBERS: Final = (
    "--prompt-cache-size",
    "--decode-concurrency",
    "--prompt-concurrency",
    "--prefill-step-size",
    "--num-draft-tokens",
)
_TEXTS: Final = ("--draft-model",)
_FLAGS: Final = ("--trust-remote-code",)
OF_NO_USE: Final = (*_NUMBERS, *_TEXTS, *_FLAGS)

#: Without what they ask for the answers would be others: refused, with what to do instead.
REFUSED: Final[Mapping[str, str]] = {
    "--adapter-path": "adapters are not loaded; put it into the weights first: mlx_lm.fuse",
    "--chat-template-args": "say it with each request: chat_template_kwargs",
    "--use-default-chat-template": "give the template that is meant: --chat-template FILE",
    "--pipeline": "a model is computed on one machine here; leave it out",
}
_REFUSED_FLAGS: Final = ("--use-default-chat-template", "--pipeline")


def options_of_mlx_lm(command: _Command) -> _Command:
    """Add them to a command, hidden."""
    for name in _NUMBERS:
        command = click.option(name, type=int, hidden=True)(command)
    for name in (*_TEXTS, *(set(REFUSED) - set(_REFUSED_FLAGS))):
        command = click.option(name, type=str, hidden=True)(command)
    for name in (*_FLAGS, *_REFUSED_FLAGS):
        command = click.option(name, is_flag=True, default=None, hidden=True)(command)
    return command


def speak_of_mlx_lm(options: Mapping[str, Any]) -> None:
    """Say which of the given options change nothing.

    Raises:
        UsageError: One cannot be kept; says what to do instead.
    """
    for name, instead in REFUSED.items():
        if _given(options, name):
            raise UsageError(f"{name}: {instead}")
    for name in OF_NO_USE:
        if _given(options, name):
            click.echo(f"kvnode: hint: {name} changes nothing here", err=True)


def _given(options: Mapping[str, Any], name: str) -> bool:
    return options[name.removeprefix("--").replace("-", "_")] is not None
