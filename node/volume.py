"""Is the data folder's volume quick enough to make a transfer number durable in passing?

Every transfer reserves its number with one durable write before Prepare is answered. A volume
whose flushes have a long tail would put that tail in front of every move, unseen; so the node
tries it before it listens, and refuses a slow one by name. A node without gRPC is moved to by
nobody: what it keeps is written beside its answers, and a slow volume is no reason not to answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpack.publish import explain, flush, private_name
from node.config import VOLUME_WORST_S, ServeConfig
from node.errors import FolderInUseError, UsageError, VolumeError

#: Durable writes in one round.
RESERVES: Final = 20

#: One round may meet a moment in which everything stands still; two in a row are the volume.
ROUNDS: Final = 2

#: Beyond it a volume does not work at all.
WORST_S_MAX: Final = 60.0

#: About what one reserve writes.
_RESERVE_BYTES: Final = 256

#: In a data folder: who holds it serves from there.
LOCK: Final = "lock"

Reserve = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True)
class VolumeBound:
    """What a volume must reach.

    Attributes:
        reserves: Durable writes in a round, 1 to 1,000.
        worst_s: The slowest may take so many seconds.

    Raises:
        UsageError: Out of range.
    """

    reserves: int = RESERVES
    worst_s: float = VOLUME_WORST_S

    def __post_init__(self) -> None:
        if not 1 <= self.reserves <= 1000:
            raise UsageError(f"reserves {self.reserves}: expected 1 to 1000")
        if not 0.001 <= self.worst_s <= WORST_S_MAX:
            raise UsageError(f"volume bound {self.worst_s} s: expected 0.001 to 60")


def volume_bound(config: ServeConfig) -> VolumeBound:
    """What the volume of this node must reach: what was said, or, without gRPC, that it works."""
    return VolumeBound(worst_s=WORST_S_MAX if config.address is None else config.volume_worst_s)


def durable_reserve(folder: Path, name: str) -> None:
    """Write, flush, rename, flush the folder: what makes one number last.

    Raises:
        OSError: The volume refuses.
    """
    fresh, place = folder / f"{name}.new", folder / name
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(descriptor, bytes(_RESERVE_BYTES))
        flush(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(place)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def probe_volume(
    folder: Path,
    bound: VolumeBound,
    reserve: Reserve = durable_reserve,
    clock_s: Callable[[], float] = time.monotonic,
) -> float:
    """Try the volume of ``folder``; returns the worst time of a good round in seconds.

    A round ends with its first write over the bound, so that a slow volume costs a few writes.

    Raises:
        VolumeError: It refuses writes, or a write took too long in each round.
    """
    name = private_name()
    try:
        for _ in range(ROUNDS):
            took_s = _round(folder, name, bound, reserve, clock_s)
            if took_s[-1] <= bound.worst_s:
                return max(took_s)
    except OSError as error:
        raise VolumeError(f"{folder}: no durable write is possible: {explain(error)}") from error
    finally:
        for left in (folder / name, folder / f"{name}.new"):
            with contextlib.suppress(OSError):
                left.unlink()
    # Twice what was seen, in tenths: a bound that the next start would miss by a hair is no help.
    enough_s = min(WORST_S_MAX, math.ceil(20 * took_s[-1]) / 10)
    raise VolumeError(
        f"{folder}: its volume is too slow for a node: {_figures(took_s)}; expected at most "
        f"{1000 * bound.worst_s:.0f} ms; use another data folder, or permit it: --volume-worst "
        f"{enough_s:g}"
    )


def _round(
    folder: Path, name: str, bound: VolumeBound, reserve: Reserve, clock_s: Callable[[], float]
) -> list[float]:
    took_s: list[float] = []
    for _ in range(bound.reserves):
        start_s = clock_s()
        reserve(folder, name)
        took_s.append(clock_s() - start_s)
        if took_s[-1] > bound.worst_s:
            break
    return took_s


def _figures(took_s: list[float]) -> str:
    said = f"durable write {len(took_s)} took {1000 * took_s[-1]:.0f} ms"
    if len(took_s) == 1:
        return said
    return f"{said}, those before at most {1000 * max(took_s[:-1]):.0f} ms"


@contextlib.contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Have ``folder`` for this process alone while the block runs, however the process ends.

    Raises:
        FolderInUseError: Another process has it.
        VolumeError: The volume refuses.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(folder / LOCK, flags, 0o600)
    except OSError as error:
        raise VolumeError(f"{folder}: no durable write is possible: {explain(error)}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise FolderInUseError(
            f"{folder}: another node process serves from it; stop it, or give this one another "
            "--data-dir"
        ) from None
    except OSError as error:
        os.close(handle)
        raise VolumeError(f"{folder}: it cannot be locked: {explain(error)}") from error
    try:
        yield
    finally:
        os.close(handle)
