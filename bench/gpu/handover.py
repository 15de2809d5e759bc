"""A prompt computed on the GPU by one process and decoded on the CPU by another, beside it.

    python -m bench.gpu.handover --contexts 2048,8192,32768,131072 --out handover.json

Two real nodes (``kvnode serve``, mTLS on loopback, one SQLite directory): the source computes where
MLX does by itself, the target with ``--device cpu``. Both load one folder of the reference geometry
(52 layers, window 2,048) with random weights, narrow so that a step on a CPU is quick. With
``--producer torch`` the source is ``kvnode produce --backend transformers`` instead. For each
context:

- *known*: the source is given the prompt and moves the session while it computes: prefill, hidden
  fraction, exposed hand-over, its phases, all as the source itself measures them;
- *live* (not with ``--producer torch``): the prompt is computed first, and the session is then
  copied: what the wire carries when nothing else is computed, and how far the next steps of both
  ends agree.

A context is cut to what leaves room for the steps. Beside each: the bounds of the design for the
measured ratio of prefill to transfer. Most memory of both processes is at the end.

Small, on a CPU: ``--layers 4 --window 64 --hidden 64 --query-heads 4 --contexts 600``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.reference import Geometry, reference_folder
from bench.gpu.common import Limit, geometry, parser, token_ids, write
from node.config import prepare_process

# Before gRPC is imported.
prepare_process()

from node.client import NodeClient  # noqa: E402
from node.demo import processes  # noqa: E402
from node.demo.processes import ServeProcess, serving  # noqa: E402
from node.demo.stage import CLIENT, SOURCE, TARGET, Stage, set_stage  # noqa: E402
from node.migration.report import as_object  # noqa: E402
from node.pb.v1 import session_pb2 as pb  # noqa: E402

#: Loading on a GPU for the first time, on a machine that was started just now.
START_S = 240.0

#: Tokens after the prompt that the context must have room for.
ROOM_TOKENS = 257

#: Prompt tokens of one prefill call: the tail that nothing hides.
CALL_TOKENS = 512

#: Least hidden fraction, by what prefill takes in transfers, at this many tokens or more.
HIDDEN = ((4.0, 0.98, 130_000), (2.0, 0.96, 130_000), (4.0, 0.93, 32_000), (2.0, 0.88, 32_000))


def main() -> None:
    """Measure and write."""
    options = _options()
    limit = Limit(options.limit_s)
    processes.START_S = START_S  # type: ignore[misc]
    shape = geometry(options)
    with reference_folder(shape) as model, tempfile.TemporaryDirectory() as name:
        limit.say("model written")
        stage = set_stage(Path(name) / "out", model, None)
        results = asyncio.run(_measure(options, shape, stage, limit))
    write(options.out, "handover", options, limit, results)


def _options() -> argparse.Namespace:
    made = parser("handover", __doc__, 480.0)
    made.add_argument("--contexts", default="2048,8192,32768,131072", help="tokens, by commas")
    made.add_argument("--producer", choices=["mlx", "torch"], default="mlx")
    made.add_argument("--source-device", choices=["cpu", "gpu"], help="default: MLX's own choice")
    made.add_argument("--target-device", choices=["cpu", "gpu"], default="cpu")
    made.add_argument("--steps", type=int, default=4, help="decoded on the target (default: 4)")
    made.add_argument("--no-live", action="store_true", help="known prompts alone")
    made.set_defaults(query_heads=8)
    return made.parse_args()


@dataclass(frozen=True)
class Ends:
    """Both nodes, and whoever talks to them."""

    source: ServeProcess
    target: ServeProcess
    giving: NodeClient
    taking: NodeClient


@contextlib.asynccontextmanager
async def _ends(options: argparse.Namespace, stage: Stage) -> AsyncIterator[Ends]:
    arguments = {name: stage.serve_arguments(name, "127.0.0.1:0") for name in (SOURCE, TARGET)}
    arguments[TARGET] += ["--device", options.target_device]
    command: tuple[str, ...] = ("serve",)
    if options.producer == "torch":
        command = ("produce", "--backend", "transformers")
    if options.source_device is not None:
        gpu = "cuda" if options.producer == "torch" else "gpu"
        arguments[SOURCE] += ["--device", gpu if options.source_device == "gpu" else "cpu"]
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(
            serving(arguments[SOURCE], stage.log(SOURCE), command)
        )
        target = await stack.enter_async_context(serving(arguments[TARGET], stage.log(TARGET)))
        credentials = stage.credentials(CLIENT)
        giving = NodeClient(credentials, SOURCE, source.address)
        taking = NodeClient(credentials, TARGET, target.address)
        await stack.enter_async_context(giving)
        await stack.enter_async_context(taking)
        yield Ends(source, target, giving, taking)


async def _measure(
    options: argparse.Namespace, shape: Geometry, stage: Stage, limit: Limit
) -> dict[str, object]:
    try:
        async with _ends(options, stage) as ends:
            limit.say("both nodes serve")
            found = [
                await _context(options, shape, ends, limit, int(tokens))
                for tokens in options.contexts.split(",")
                if limit.allows(f"context {tokens}", 10.0)
            ]
            memory = {SOURCE: _memory(ends.source.pid), TARGET: _memory(ends.target.pid)}
    except BaseException:
        for name in (SOURCE, TARGET):
            if stage.log(name).exists():
                limit.say(f"{name}: " + stage.log(name).read_text(errors="replace")[-2000:])
        raise
    return {
        "producer": options.producer,
        "target_device": options.target_device,
        "contexts": found,
        "most_host_memory_bytes": memory,
        "rows_go_by": _ways(stage),
    }


async def _context(
    options: argparse.Namespace, shape: Geometry, ends: Ends, limit: Limit, asked: int
) -> dict[str, object]:
    tokens = min(asked, 131_072 - ROOM_TOKENS)
    prompt = token_ids(tokens, 250)
    found: dict[str, object] = {"asked_tokens": asked, "prompt_tokens": tokens}
    live = None
    if options.producer == "mlx" and not options.no_live:
        live = await _live(options, ends, limit, prompt)
        found["live"] = live
    if limit.allows(f"known prompt of {tokens}", 5.0):
        known = await _known(options, ends, limit, prompt)
        found["known"] = known
        if live is not None:
            found["bounds"] = _bounds(shape, known, live)
    return found


async def _known(
    options: argparse.Namespace, ends: Ends, limit: Limit, prompt: list[int]
) -> dict[str, object]:
    """Moved while it is computed; copied by a producer that keeps no sessions."""
    name = f"known-{len(prompt)}"
    session = await ends.giving.open(name)
    request = _request(ends, session)
    request.token_ids.extend(prompt)
    if options.producer == "torch":
        request.copy_as = f"{name}-copy"
    result, seconds = await _migrated(ends, request)
    said = _said(result)
    limit.say(
        f"known {len(prompt)}: prefill {said['prefill_s']:.2f} s, hidden "
        f"{said['hidden_fraction']:.4f}, exposed {said['exposed_handover_s']:.3f} s, "
        f"{said['continuation_verdict']}, drift {said['drift']:.2e}"
    )
    name = result.session_id
    moved = await ends.taking.get(name)
    steps, _ = await _steps(ends.taking, moved, result.first_index, options.steps)
    await ends.taking.close_session(await ends.taking.get(name))
    return {"move": said, "whole_s": seconds, "target_step_s": steps}


async def _live(
    options: argparse.Namespace, ends: Ends, limit: Limit, prompt: list[int]
) -> dict[str, Any]:
    """Computed first, and then copied."""
    name = f"live-{len(prompt)}"
    session = await ends.giving.open(name)
    start = time.perf_counter()
    session = await ends.giving.append(session, prompt)
    prefill_s = time.perf_counter() - start
    request = _request(ends, session)
    request.copy_as = f"{name}-copy"
    result, seconds = await _migrated(ends, request)
    said = _said(result)
    push_s = said["prefill_s"] + said["phases"]["pushed_s"]
    limit.say(
        f"live {len(prompt)}: prefill alone {prefill_s:.2f} s, {said['payload_bytes']} B in "
        f"{push_s:.3f} s ({said['payload_bytes'] / push_s / 1e9:.2f} GB/s), exposed "
        f"{said['exposed_handover_s']:.3f} s"
    )
    copy = await ends.taking.get(request.copy_as)
    index = result.first_index
    target_s, theirs = await _steps(ends.taking, copy, index, options.steps)
    session = await ends.giving.get(name)
    source_s, ours = await _steps(ends.giving, session, index, options.steps)
    await ends.taking.close_session(await ends.taking.get(request.copy_as))
    await ends.giving.close_session(await ends.giving.get(name))
    return {
        "prefill_alone_s": prefill_s,
        "move": said,
        "whole_s": seconds,
        "push_s": push_s,
        "wire_gbytes_per_s": said["payload_bytes"] / push_s / 1e9,
        "target_step_s": target_s,
        "source_step_s": source_s,
        "agreement": _agreement(ours, theirs),
    }


def _said(result: pb.MigrateResult) -> dict[str, Any]:
    """What the source measured."""
    said = as_object(result)
    del said["token"]
    return said


def _request(ends: Ends, session: pb.SessionReply) -> pb.MigrateRequest:
    return pb.MigrateRequest(
        session_id=session.session_id,
        token=session.token,
        target_node=ends.target.node,
        target_address=str(ends.target.address),
        accept_compatible=True,
    )


async def _migrated(ends: Ends, request: pb.MigrateRequest) -> tuple[pb.MigrateResult, float]:
    start = time.perf_counter()
    async for event in ends.giving.migrate(request):
        if event.WhichOneof("event") == "result":
            return event.result, time.perf_counter() - start
    raise RuntimeError("a hand-over ended without a result")


async def _steps(
    client: NodeClient, session: pb.SessionReply, index: int, count: int
) -> tuple[list[float], list[pb.GenerateEvent]]:
    """Seconds from event to event. The first one was computed by the move already."""
    seconds: list[float] = []
    events: list[pb.GenerateEvent] = []
    last = time.perf_counter()
    async for event in client.generate(session, index, count):
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        events.append(event)
    return seconds[1:], events


def _agreement(ours: list[pb.GenerateEvent], theirs: list[pb.GenerateEvent]) -> dict[str, object]:
    """Logits of both ends, as long as both were fed the same tokens."""
    drift: list[float] = []
    bitwise = same = 0
    for left, right in zip(ours, theirs, strict=False):
        bitwise += left.logits == right.logits
        # The reference folder's weights are float16, and its logits.
        pair = [np.frombuffer(one.logits, "<f2").astype(np.float32) for one in (left, right)]
        drift.append(float(np.max(np.abs(pair[0] - pair[1]))))
        if left.token_id != right.token_id:
            break
        same += 1
    return {
        "compared": len(drift), "equal_tokens": same, "bitwise_equal": bitwise,
        "most_drift": max(drift, default=None),
    }  # fmt: skip


def _bounds(shape: Geometry, known: dict[str, Any], live: dict[str, Any]) -> dict[str, object]:
    """What the design asks for at the measured ratio of prefill to transfer."""
    move, rate = known["move"], live["wire_gbytes_per_s"] * 1e9
    transfer_s = move["payload_bytes"] / rate
    ratio = move["prefill_s"] / transfer_s
    tail_bytes = shape.layers * CALL_TOKENS * 1024
    step_s = known["target_step_s"][0] if known["target_step_s"] else 0.0
    phases = move["phases"]
    commit_s = phases["committed_s"] - phases["sealed_s"]
    exposed_most = 1.2 * tail_bytes / rate + step_s + commit_s + 0.010
    tokens = move["position"]
    hidden = next((h for r, h, least in HIDDEN if ratio >= r and tokens >= least), None)
    return {
        "prefill_over_transfer": ratio,
        "hidden_fraction": move["hidden_fraction"],
        "hidden_least": hidden,
        "exposed_handover_s": move["exposed_handover_s"],
        "exposed_most_s": exposed_most,
        "tail_bytes": tail_bytes,
        "tail_s": tail_bytes / rate,
        "step_s": step_s,
        "commit_s": commit_s,
    }


def _memory(pid: int) -> dict[str, int]:
    """What the system says of a process's memory, as far as it says anything."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS") and value.split():
                found[name] = int(value.split()[0]) * 1024
    return found


def _ways(stage: Stage) -> dict[str, str]:
    """What the nodes' logs say about how rows are copied; nothing where there is only one way."""
    found: dict[str, str] = {}
    for name in (SOURCE, TARGET):
        for line in stage.log(name).read_text(errors="replace").splitlines():
            if "rows are copied" in line:
                found[name] = line.partition("rows are copied ")[2]
    return found


if __name__ == "__main__":
    main()
