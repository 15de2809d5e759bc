"""Options that several commands share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from kvpack.codes import Codec
from kvpack.compression import Compression, choose_codec
from kvpack.keys import EpochKey, Keyring, load_key_file, load_keyring
from kvpack.medium import measure_write_bits_per_s
from kvpack.store.places import scheme_of

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _TypedPath(click.Path):
    """A path as typed. An empty one is refused: it would mean the working directory."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """Return ``value`` itself."""
        if os.fspath(value) == "":
            self.fail("a name is empty", param, ctx)
        return os.fspath(value)


PATH: Final = _TypedPath()

compression_option = click.option(
    "--compression",
    type=click.Choice([choice.value for choice in Compression]),
    help="Seal rows anew: raw, compressed, or by the speed of the medium, which is measured. "
    "Without it every object keeps its bytes.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")

NEEDS_KEY: Final = "a key is needed: --key FILE or --keyring DIR"


def key_options(command: _Command) -> _Command:
    """Add ``--key`` and ``--keyring``, each as often as wanted."""
    ring = click.option(
        "--keyring",
        "keyrings",
        multiple=True,
        type=PATH,
        metavar="DIR",
        help="A folder of *.key files, or one key file; may be repeated.",
    )
    key = click.option(
        "--key",
        "keys",
        multiple=True,
        type=PATH,
        metavar="FILE",
        help="A key file; may be repeated.",
    )
    return key(ring(command))


def keyring_of(keys: tuple[str, ...], keyrings: tuple[str, ...]) -> Keyring:
    """All keys that were given.

    Raises:
        KeyFileError: One of them cannot be used, or two contradict each other.
    """
    held: list[EpochKey] = [load_key_file(key) for key in keys]
    for ring in keyrings:
        held.extend(load_keyring(ring) if Path(ring).is_dir() else [load_key_file(ring)])
    return Keyring(held)


def require_keys(context: click.Context, keys: tuple[str, ...], keyrings: tuple[str, ...]) -> None:
    """Refuse a call without any key.

    Raises:
        UsageError: Neither option was given.
    """
    if not keys and not keyrings:
        raise click.UsageError(NEEDS_KEY, context)


def codec_for(compression: str | None, folder: str) -> Codec | None:
    """What ``--compression`` asks for where ``folder`` is the medium; None: leave all as it is.

    Raises:
        OSError: The speed had to be measured, and the folder takes no file.
    """
    if compression is None:
        return None
    wanted = Compression(compression)
    # How fast a bucket is nobody knows; what is not known counts as fast.
    auto = wanted is Compression.AUTO and not scheme_of(folder)
    return choose_codec(wanted, measure_write_bits_per_s(folder, time.monotonic) if auto else None)
