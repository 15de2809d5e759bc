"""A process that is killed loses no cut that was durable, and leaves nothing that misleads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ladder_child import digest
from ladder_support import make_model, rows, text

from kvpack.keys import write_key_file
from kvpack.store import Severity, check_store, open_store
from node.serving.order import MissReason

_HERE = Path(__file__).parent


def grow_and_kill(folder: Path, store: Path, key: Path, cuts: int, late_s: float) -> list:
    """Run a child until it told of ``cuts`` cuts and ``late_s`` more; what it told."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_HERE.parents[2]), *sys.path])}
    command = [sys.executable, str(_HERE / "ladder_child.py"), *map(str, (folder, store, key))]
    told = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        watchdog = threading.Timer(30, child.kill)
        watchdog.start()
        try:
            for line in child.stdout:
                told.append(json.loads(line))
                if len(told) == cuts:
                    break
            time.sleep(late_s)
        finally:
            watchdog.cancel()
            child.send_signal(signal.SIGKILL)
        told += [json.loads(line) for line in child.stdout if line.endswith(b"\n")]
    return told


@pytest.mark.parametrize(
    "late_s",
    [0.03, *(pytest.param(late_s, marks=pytest.mark.slow) for late_s in (0.0, 0.01, 0.1, 0.2))],
)
def test_after_a_kill_every_durable_cut_is_there_bit_for_bit(laddered, tmp_path, late_s):
    async def work(place):
        key = tmp_path / "tenant.key"
        write_key_file(key, place.keys["ours"])
        model = make_model(tmp_path / "model")
        told = grow_and_kill(model, place.folder, key, 4, late_s)
        assert len(told) >= 4
        findings = list(check_store(open_store(place.folder), place.keyring, deep=True))
        assert [f for f in findings if f.severity is Severity.DAMAGE] == []
        await place.again()
        for ids, rows_digest in told:
            base = await place.ladder.begin("ours", ids)
            assert base.position == len(ids) - 1 and base.miss is MissReason.NONE
            assert digest(await rows(place.engine, base.generation)) == rows_digest
        # And it goes on from there, under the leftovers of the dead process.
        turn = await place.answer([*told[-1][0], *text(10, 70)], 3)
        assert turn.evaluated == 11
        await place.ladder.settled()
        assert place.ladder.accounts.dropped == 0

    laddered(work)
