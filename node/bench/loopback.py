"""Both ends on this machine: two child processes with credentials that are thrown away."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvpack.keys import generate_key, write_key_file
from node import enroll
from node.bench.order import BenchOrder
from node.demo.processes import ChildError, run_command, serving
from node.files import make_private_folder
from node.handover import copy_tenant_key
from node.trust import Role, pin

SOURCE: Final = "source"
TARGET: Final = "target"
_TENANT: Final = "bench"

#: The longest run: a million tokens on a slow machine.
_RUN_S: Final = 3600.0


async def measure_loopback(order: BenchOrder) -> dict[str, Any]:
    """Start both ends, measure, stop them; gives the values.

    Raises:
        ChildError: One of them failed; the message is its own.
    """
    with tempfile.TemporaryDirectory(prefix="kvnode-bench-") as name:
        stage = Path(name)
        make_private_folder(stage / "work")
        _enroll_both(stage / "work")
        serve = [*_common(stage / "work", TARGET, order), "--grpc", "127.0.0.1:0"]
        serve += ["--spool"] if order.spools else []
        if order.data_plane.is_plain:
            serve += ["--data-plane", f"{order.data_plane.value}=127.0.0.1:0"]
            serve += ["--data-plane-from", SOURCE]
        log = stage / "target.log"
        async with serving(serve, log, ("bench", "serve")) as target:
            ran = await run_command(
                "node",
                "bench",
                "move",
                *_common(stage / "work", SOURCE, order),
                *_asked(order),
                "--to",
                str(target.address),
                "--node",
                TARGET,
                "--json",
                within_s=_RUN_S,
            )
        if ran.exit_code:
            raise ChildError(_last_line(ran.stderr) or f"the source ended with {ran.exit_code}")
        values: dict[str, Any] = json.loads(ran.stdout)
        return values


def _common(work: Path, name: str, order: BenchOrder) -> list[str]:
    sample = [] if order.rows is None else ["--rows", str(order.rows)]
    return [
        *sample,
        "--layout", order.layout_name,
        "--data-dir", str(work / f"{name}-data"),
        "--credentials", str(work / f"{name}-credentials"),
    ]  # fmt: skip


def _asked(order: BenchOrder) -> Sequence[str]:
    return [
        "--tokens", str(order.tokens),
        "--held", str(order.held_tokens),
        "--kind", order.kind.value,
        "--stall", str(order.stall_s),
        "--data-plane", order.data_plane.value,
        "--compression", "on" if order.compress else "off",
        *([] if order.pushes else ["--without-pushes"]),
    ]  # fmt: skip


def _enroll_both(work: Path) -> None:
    key = work / "tenant.key"
    write_key_file(key, generate_key(_TENANT))
    for name in (SOURCE, TARGET):
        enroll.enroll(work / "authority", work / f"{name}-credentials", name)
        copy_tenant_key(key, work / f"{name}-credentials")
    for own, other in ((SOURCE, TARGET), (TARGET, SOURCE)):
        leaf = work / f"{other}-credentials" / enroll.NODE_CERTIFICATE
        pin(work / f"{own}-credentials", leaf.read_bytes(), Role.NODE)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("kvnode: error: ")]
    return lines[-1].removeprefix("kvnode: error: ") if lines else "\n".join(text.splitlines()[-3:])
