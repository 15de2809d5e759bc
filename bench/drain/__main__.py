"""``python -m bench.drain``: a drain of many sessions, and one stream, between two processes.

Rows are made (``kvnode bench move`` says how), of the reference geometry; sessions are idle, so
each move is live: full layers first, then it is held for the rest. Everything else is a served
node's: real processes, mutual TLS, the durable spool, the store of cuts, one directory file, and
the real ``kvnode drain``. One run takes, in this order: single sessions of the same size, one after
another with a pause; the drain; one session that is eight times as large.

The rate of one stream is the payload over the time from Prepare's answer to the end of Push. The
drain's is all payload over the whole command's time but its start, from asking the node to leave
to the last session's end. A virtual machine's host takes back memory that nobody used for a while
and gives it again at a tenth of the rate at which a move writes it; so before the single sessions
and before the drain another process writes as much memory once as the target will take. Times of
each move are from the source's log, to 1 ms; how long a session was without an owner is what its
own move measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from node.config import child_environment, prepare_process

# gRPC reads its environment when it is imported.
prepare_process()

from bench.drain.ends import CLIENT, ROOT, Ends, Running  # noqa: E402
from kvpack.layout import LayerKind  # noqa: E402
from node.bench.geometry import muse_glimmer  # noqa: E402
from node.bench.model import token_ids  # noqa: E402
from node.client import NodeClient  # noqa: E402
from node.config import Address  # noqa: E402
from node.placement.drain import PARALLEL  # noqa: E402
from node.placement.moving import move_one  # noqa: E402
from node.placement.values import Continuation, SessionLoad, Step  # noqa: E402

MIB = 1 << 20
LARGER = 8
PAUSE_S = 0.5
BOUND = 0.8
#: Of a session on its target: planes with room for more, spool, store, and the page cache of both.
COPIES = 5


def tokens_of(size_bytes: int) -> int:
    """The fewest tokens whose rows take so many bytes, and the boundary token."""
    layout, low, high = muse_glimmer(), 1, muse_glimmer().max_context_tokens
    while low < high:
        middle = (low + high) // 2
        held = sum(layout.state_bytes(kind, middle) for kind in LayerKind)
        low, high = (low, middle) if held >= size_bytes else (middle + 1, high)
    return low + 1


async def _provided(sessions: int, mib: int) -> None:
    """Have the machine's host provide the memory that so many sessions will take, if it must.

    Planes, spool and store of each; and at most half of what is free.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(sessions * mib * MIB * COPIES, free // 2)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"import numpy; numpy.empty({size}, numpy.uint8).fill(1)"
    )
    await child.wait()


async def _fill(client: NodeClient, names: list[str], tokens: int) -> None:
    for name in names:
        await client.append(await client.open(name), token_ids(tokens))


async def _alone(ends: Ends, client: NodeClient, to: Address, names: list[str]) -> list[Any]:
    """Each of the sessions moved with nothing else under way."""
    found = []
    for name in names:
        await asyncio.sleep(PAUSE_S)
        step = Step(SessionLoad(name, 0), "source", "target", Continuation.EXACT)
        found.append(_result(await move_one(client, step, to, accept_compatible=False)))
    return _timed(ends, found)


async def _close_all(ends: Ends, target: Address) -> None:
    """A node holds 64 sessions: what has been measured makes room for what comes."""
    async with ends.client("target", target) as client:
        for session in await client.list_sessions():
            await client.close_session(session)


def _result(moved: Any) -> dict[str, Any]:
    phases = moved.phases
    return {
        "session_id": moved.session_id, "payload_bytes": moved.payload_bytes,
        "exposed_handover_s": moved.exposed_handover_s,
        "target_durable_s": phases.target_durable_s, "target_transfer_s": phases.target_transfer_s,
    }  # fmt: skip


def _timed(ends: Ends, moved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = ends.steps("source")
    for one in moved:
        at = steps[one["session_id"]]
        one["prepare_s"] = at["streaming"] - at["preparing"]
        one["push_s"] = at["sealing"] - at["streaming"]
        one["commit_s"] = at["released"] - at["sealing"]
        one["move_s"] = at["released"] - at["preparing"]
    return moved


async def _drain(ends: Ends, source: Address, parallel: int) -> dict[str, Any]:
    """The real command. Its own time begins when it asks the node to leave."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "node", "drain", f"source@{source}",
        "--credentials", str(ends.credentials(CLIENT)), "--json", "--parallel", str(parallel),
        stdout=asyncio.subprocess.PIPE, env=child_environment(ROOT),
    )  # fmt: skip
    said, _ = await process.communicate()
    done: dict[str, Any] = json.loads(said)
    if process.returncode or done["stayed"]:
        raise SystemExit(f"the drain left something: {json.dumps(done['stayed'])}")
    done["moved"] = _timed(
        ends,
        [
            {
                **{key: one[key] for key in ("session_id", "payload_bytes", "exposed_handover_s")},
                "target_durable_s": one["phases"]["target_durable_s"],
                "target_transfer_s": one["phases"]["target_transfer_s"],
            }
            for one in done["moved"]
        ],
    )
    return done


async def measure(root: Path, asked: argparse.Namespace) -> dict[str, Any]:
    ends, sessions, alone = Ends.make(root), asked.sessions, asked.alone
    tokens, larger = tokens_of(asked.mib * MIB), tokens_of(LARGER * asked.mib * MIB)
    async with ends.running("target", tokens - 1) as target:
        async with (
            ends.running("source", tokens - 1) as source,
            ends.client("source", source.address) as client,
        ):
            await _fill(client, names := [f"one{i}" for i in range(alone + 1)], tokens)
            # The first one opens files and grows buffers: it is not counted.
            await _alone(ends, client, target.address, names[:1])
            await _provided(alone, asked.mib)
            spent = Spent(source, target)
            singles = await _alone(ends, client, target.address, names[1:])
            used_alone = spent.over(alone)
            await _close_all(ends, target.address)
            await _fill(client, [f"many{i}" for i in range(sessions)], tokens)
            await asyncio.sleep(PAUSE_S)
            await _provided(sessions, asked.mib)
            load, started, spent = os.getloadavg()[0], time.monotonic(), Spent(source, target)
            drained = await _drain(ends, source.address, asked.parallel)
            drained["command_s"] = time.monotonic() - started
            used = spent.over(sessions)
        await _close_all(ends, target.address)
        async with (
            ends.running("source", larger - 1) as source,
            ends.client("source", source.address) as client,
        ):
            await _fill(client, ["large"], larger)
            large = await _alone(ends, client, target.address, ["large"])
    return {
        **_report(singles, drained, large[0]),
        "cpu_s_for_each": used, "cpu_s_for_each_alone": used_alone, "load": load, "rows": "made",
    }  # fmt: skip


class Spent:
    """Processor time of both ends since it was made."""

    def __init__(self, source: Running, target: Running) -> None:
        self._ends = {"source": source, "target": target}
        self._before = {name: end.cpu_s() for name, end in self._ends.items()}

    def over(self, moves: int) -> dict[str, float]:
        """For each of so many moves, by end. What the target keeps afterwards is in it."""
        return {
            name: (end.cpu_s() - self._before[name]) / moves for name, end in self._ends.items()
        }


def _rate(moves: list[dict[str, Any]], key: str) -> list[float]:
    return [one["payload_bytes"] / one[key] for one in moves]


def _report(
    singles: list[dict[str, Any]], drained: dict[str, Any], large: dict[str, Any]
) -> dict[str, Any]:
    moved = drained["moved"]
    payload = sum(one["payload_bytes"] for one in moved)
    rate, single = payload / drained["seconds"], statistics.median(_rate(singles, "push_s"))
    larger = large["payload_bytes"] / large["push_s"]
    frozen = [one["exposed_handover_s"] for one in moved]
    return {
        "sessions": len(moved),
        "session_bytes": moved[0]["payload_bytes"],
        "payload_bytes": payload,
        "drain_s": drained["seconds"],
        "command_s": drained["command_s"],
        "drain_mb_per_s": rate / 1e6,
        "single_push_mb_per_s": [one / 1e6 for one in sorted(_rate(singles, "push_s"))],
        "single_move_mb_per_s": [one / 1e6 for one in sorted(_rate(singles, "move_s"))],
        "larger_push_mb_per_s": larger / 1e6,
        "drain_over_single_push": rate / single,
        "drain_over_larger_push": rate / larger,
        "drain_over_single_move": rate / statistics.median(_rate(singles, "move_s")),
        "met": rate >= BOUND * single,
        "without_owner_s": _spread(frozen),
        "without_owner_alone_s": _spread([one["exposed_handover_s"] for one in singles]),
        "longer_than_own_move": sum(one["exposed_handover_s"] >= one["move_s"] for one in moved),
        "moves": {key: _spread([one[key] for one in moved]) for key in _STEPS},
        "moves_alone": {key: _spread([one[key] for one in singles]) for key in _STEPS},
    }


_STEPS = ("prepare_s", "push_s", "commit_s", "move_s", "target_durable_s", "target_transfer_s")


def _spread(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def main() -> None:
    """Measure, print; exit 1 where the bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.drain", description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--mib", type=int, default=64, help="rows of one session")
    parser.add_argument("--alone", type=int, default=5, help="single moves before")
    parser.add_argument("--parallel", type=int, default=PARALLEL, help="as of kvnode drain")
    parser.add_argument("--dir", type=Path, help="on the volume to spool to")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpack-drain-", dir=asked.dir) as name:
        found = asyncio.run(measure(Path(name), asked))
    if asked.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:24} {value}")
    sys.exit(not found["met"])


if __name__ == "__main__":
    main()
