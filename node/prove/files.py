"""Names of the files that the two children share. Made of case names only."""

from __future__ import annotations

from typing import Final

from node.prove.cases import Continuation, RollbackStation, Station

CONTROL_FILE: Final = "control.twin"


def cut_file(station: Station | RollbackStation) -> str:
    """The bare cut."""
    return f"{station.name}.cut"


def pack_file(station: Station) -> str:
    """The pack of the cut."""
    return f"{station.name}.kvpack"


def twin_file(station: Station, kind: Continuation) -> str:
    """What the uninterrupted session gives."""
    return f"{station.name}.{kind.value}.twin"


def block_file(station: RollbackStation, count: int) -> str:
    """The logits of a block of ``count`` tokens."""
    return f"{station.name}.{count}.block"


def kept_file(station: RollbackStation, count: int, kept: int) -> str:
    """What a session gives that kept ``kept`` tokens of such a block."""
    return f"{station.name}.{count}.{kept}.twin"
