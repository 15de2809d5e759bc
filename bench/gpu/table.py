"""``python -m bench.gpu.table FILE...``: the results of :mod:`bench.gpu` as Markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def main() -> None:
    """Print a table for each file."""
    for name in sys.argv[1:]:
        said = json.loads(Path(name).read_text())
        print(
            "\n".join([*_heading(said, Path(name).name), "", *_TABLES[said["measurement"]](said)])
        )
        print()


def _heading(said: Found, name: str) -> list[str]:
    machine, arguments = said["machine"], said["arguments"]
    versions = ", ".join(
        f"{key} {machine[key]}" for key in ("mlx", "torch", "transformers") if key in machine
    )
    return [
        f"**{said['measurement']}** on {machine['device']} ({machine['backend']}, {versions}; "
        f"{arguments['layers']} layers, window {arguments['window']}, hidden "
        f"{arguments['hidden']}, load {machine['load'][0]:.1f}), {said['date']}: "
        f"`{said['command']}`, raw in `docs/results/{name}`",
    ]


def _spread(found: Found, digits: int = 2) -> str:
    return (
        f"{found['median']:.{digits}f} ({found['least']:.{digits}f} to {found['most']:.{digits}f})"
    )


def _snapshot(said: Found) -> Iterator[str]:
    results = said["results"]
    out, into = results["device_to_host"], results["host_to_device"]
    yield f"Cut after {results['context_tokens']:,} tokens, {results['cut_bytes']:,} B."
    yield ""
    yield "| device to host | GB/s, median (range) |"
    yield "|---|---:|"
    for key, rate in out["gbytes_per_s"].items():
        yield f"| {key.replace('_', ' ')} | {_spread(rate)} |"
    for key in sorted(key for key in out if "_over_" in key):
        yield f"| **{key.replace('_', ' ')}** | {_spread(out[key])} |"
    if "views" in results:
        yield f"| by host views, once | {results['views']['read_gbytes_per_s']:.2f} |"
    yield ""
    yield "| host to device | GB/s, median (range) |"
    yield "|---|---:|"
    for key, rate in into["gbytes_per_s"].items():
        yield f"| {key.replace('_', ' ')} | {_spread(rate)} |"
    yield f"| **install over plain pageable** | {_spread(into['install_over_plain_pageable'])} |"
    if "install_gbytes_per_s" in results.get("views", {}):
        yield f"| by host views, once | {results['views']['install_gbytes_per_s']:.2f} |"
    yield ""
    yield "| a decode step | first, ms | then, ms, median (range) |"
    yield "|---|---:|---:|"
    for key, step in results["step_s"].items():
        scaled = {name: 1e3 * step[name] for name in ("median", "least", "most")}
        yield f"| {key.replace('_', ' ')} | {1e3 * step['first']:.2f} | {_spread(scaled)} |"
    yield ""
    replay, views = results["replay"], results.get("views")
    yield f"Steps of the installed cut that are bitwise equal: {replay['equal']}/{replay['steps']}."
    if views:
        yield f"Tiles equal to those of host views: {views['equal_tiles']}/{views['tiles']}."


def _replay(said: Found) -> Iterator[str]:
    results = said["results"]
    yield "| restored from a pack | steps | bitwise equal | tokens equal | most drift | numerics |"
    yield "|---|---:|---:|---:|---:|---|"
    for key, verdict in (("restored", "exact"), ("restored_on_cpu", "compatible")):
        if key in results:
            one = results[key]
            yield (
                f"| {one['position']:,} tokens, on {one['backend']} | {one['steps']} | "
                f"{one['bitwise_equal']} | {one['equal_tokens']} | {one['most_drift']:.2e} | "
                f"{one.get('continuation', verdict)} |"
            )
    if "prove" in results:
        said_last = results["prove"].get("said")
        line = said_last.get("line") if isinstance(said_last, dict) else None
        yield ""
        yield f"`kvnode prove`: exit code {results['prove']['exit_code']}. {line or ''}".rstrip()


def _handover(said: Found) -> Iterator[str]:
    results = said["results"]
    yield (
        "| prompt | prefill, s | prefill / transfer | hidden | wanted | exposed, ms | at most, ms |"
        " wire, GB/s | boundary, pushed, sealed, committed, ms | continuation, drift |"
    )
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|---|---|"
    for one in results["contexts"]:
        if "known" not in one:
            continue
        move, bounds, live = one["known"]["move"], one.get("bounds"), one.get("live")
        phases = move["phases"]
        times = ", ".join(
            f"{1e3 * phases[key]:.0f}"
            for key in ("boundary_s", "pushed_s", "sealed_s", "committed_s")
        )
        wanted, ratio, most, wire = "", "", "", ""
        if bounds:
            ratio = f"{bounds['prefill_over_transfer']:.1f}"
            wanted = "" if bounds["hidden_least"] is None else f">= {bounds['hidden_least']}"
            most = f"{1e3 * bounds['exposed_most_s']:.0f}"
        if live:
            wire = f"{live['wire_gbytes_per_s']:.2f}"
        yield (
            f"| {one['prompt_tokens']:,} | {move['prefill_s']:.2f} | {ratio} | "
            f"{move['hidden_fraction']:.4f} | {wanted} | {1e3 * move['exposed_handover_s']:.0f} | "
            f"{most} | {wire} | {times} | {move['continuation_verdict']}, {move['drift']:.1e} |"
        )
    yield ""
    memory = results["most_host_memory_bytes"]
    for name, found in memory.items():
        if found:
            yield f"Most host memory of the {name}: {max(found.values()):,} B. "


_TABLES = {"snapshot": _snapshot, "replay": _replay, "handover": _handover}


if __name__ == "__main__":
    main()
