"""``kvnode bench move`` as a contender: one run is a push, its own yardstick, and a whole move."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measured import FAILED, NOT_THERE_YET, Contender, Sample
from bench.peers import MUTUAL
from bench.real import TITLE
from bench.turns import NoFigureError, Turn

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240.0

#: Protected on the way by mTLS and by each chunk's own seal, which also binds model and position.
OURS = f"{MUTUAL}; each chunk sealed and bound to model, layer and position"
AT_REST = "encryption and authentication at rest, bound to model, layer and position"
PLAIN = "each chunk sealed and bound to model, layer and position; control by mTLS"

#: What ``--data-plane`` calls the planes of the wanted rows beside the default.
_PLANES = {"b": "grpc-plain", "c": "socket"}


@functools.cache
def data_planes() -> Mapping[str, str]:
    """Values of ``--data-plane`` of this build for the planes b and c, where it has them."""
    ran = subprocess.run(
        [sys.executable, "-m", "node", "bench", "move", "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found = re.search(r"--data-plane\s+\[([\w|\s-]+)\]", ran.stdout)
    offered = re.sub(r"\s", "", found[1]).split("|") if found else []
    return {plane: word for plane, word in _PLANES.items() if word in offered}


def bench_move(
    arguments: Sequence[str], limit_s: float = LIMIT_S, prefix: Sequence[str] = ()
) -> dict[str, Any]:
    """One run over loopback, both ends real processes; its values. ``prefix`` runs the command.

    Raises:
        NoFigureError: It failed, or a row that was installed is not the one that was sent.
    """
    command = [*prefix, sys.executable, "-m", "node", "bench", "move", "--loopback", "--json"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NoFigureError(FAILED, f"kvnode bench move took more than {limit_s:.0f} s") from None
    finally:
        if process.poll() is None:
            # It ends its own children.
            process.terminate()
            process.wait()
    if not out.strip():
        raise NoFigureError(FAILED, err.strip().splitlines()[-1] if err.strip() else "no answer")
    values: dict[str, Any] = json.loads(out)
    if not values["installed_equal"]:
        raise NoFigureError(FAILED, "rows that were installed are not those that were sent")
    return values


def move_turn(
    group: str, tokens: int, against: str, *, plane: str = "", spools: bool = False, held: int = 0,
    pushes: bool = True, suffix: str = "", real: Callable[[], Path] | None = None,
    rounds_max: int | None = None,
) -> Turn:  # fmt: skip
    """One run a round, of a session that decodes on.

    Args:
        group: Who takes turns.
        tokens: Of the session.
        against: The group's reference for the whole move.
        plane: ``b`` or ``c``; empty for the default, mTLS.
        spools: Whether the target writes a durable spool.
        held: Tokens that the target holds.
        pushes: Whether the push and its yardstick are measured, too.
        suffix: Of the contenders' names.
        real: Gives a file of rows that a model computed; None for made ones.
        rounds_max: It takes part in so many rounds alone.
    """
    word = f"{'_' + plane if plane else ''}{suffix}"
    protects = PLAIN if plane else OURS
    how = f" (plane {plane})" if plane else ""
    disk = ", durable spool" if spools else ""
    part = f", {held:,} tokens held" if held else ""
    part += "" if real is None else f", {TITLE}"
    move = Contender(
        f"move{word}", f"kvnode: whole move{how}{disk}{part}", group, against, protects
    )
    contenders = [move]
    if pushes:
        bare = Contender(
            f"bare_tls{word}", "bare TLS 1.3, the same two processes", group, protects=MUTUAL
        )  # fmt: skip
        pushed, sealing = (
            Contender(f"push{word}{name}", f"kvnode: push of {what} chunks{how}{part}", group,
                      bare.name, protects)
            for name, what in (("", "sealed"), ("_sealing", "not yet sealed"))
        )  # fmt: skip
        contenders += [bare, pushed, sealing]
    arguments = ["--tokens", str(tokens), "--kind", "session", "--held", str(held)]
    arguments += ["--spool"] if spools else []
    arguments += [] if pushes else ["--without-pushes"]

    def once() -> dict[str, Sample]:
        if plane and plane not in data_planes():
            raise NoFigureError(NOT_THERE_YET, "kvnode bench move has no --data-plane for it")
        chosen = ["--data-plane", data_planes()[plane]] if plane else []
        rows = [] if real is None else ["--rows", str(real())]
        values = bench_move([*arguments, *chosen, *rows])
        return _samples(values, word) if pushes else {move.name: sample_of_move(values)}

    return Turn(contenders, once, rounds_max=rounds_max)


def sample_of_move(values: Mapping[str, Any]) -> Sample:
    """From the order to move to the target's ownership; a byte is one that is there afterwards."""
    detail = {
        "exposed_s": values["exposed_handover_s"],
        "hidden_fraction": values["hidden_fraction"],
        "durable_s": values["phases"]["target_durable_s"],
        "sent_bytes": values["payload_bytes"],
        "wire_bytes": values["wire_bytes"],
    }
    seconds = values["prefill_s"] + values["phases"]["committed_s"]
    return Sample(seconds, values["payload_bytes"] + values["held_bytes"], detail=detail)


def sample_of_push(values: Mapping[str, Any]) -> Sample:
    """Of chunks that were sealed before, from the first write to the last one installed."""
    cpu = {
        f"{end}_cpu_s_per_gb": values[f"{end}_cpu_s_per_gbyte"] for end in ("source", "target")
    }  # fmt: skip
    size = _pushed_bytes(values)
    return Sample(values["push_s"], size, sum(cpu.values()) * size / 1e9, cpu)


def _pushed_bytes(values: Mapping[str, Any]) -> int:
    return round(values["push_gbytes_per_s"] * 1e9 * values["push_s"])


def _sample_of_sealing(values: Mapping[str, Any]) -> Sample:
    """Chunks that are sealed on their way: by their own push, else by what the move took."""
    size, cpu_s = _pushed_bytes(values), None
    if values.get("sealing_source_cpu_s_per_gbyte") is not None:
        ends = [values[f"sealing_{end}_cpu_s_per_gbyte"] for end in ("source", "target")]
        cpu_s = sum(ends) * size / 1e9
    if values.get("sealing_push_s"):
        return Sample(values["sealing_push_s"], size, cpu_s)
    seconds = values["prefill_s"] + values["phases"]["pushed_s"]
    return Sample(seconds, values["payload_bytes"], cpu_s)


def _samples(values: Mapping[str, Any], word: str) -> dict[str, Sample]:
    return {
        f"move{word}": sample_of_move(values),
        f"bare_tls{word}": Sample(values["tls_baseline_s"], _pushed_bytes(values)),
        f"push{word}": sample_of_push(values),
        f"push{word}_sealing": _sample_of_sealing(values),
    }
