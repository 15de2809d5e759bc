"""What is measured on one store. Each case runs in a process of its own: its memory is its own."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.format.memory import resident_peak_bytes
from bench.index.world import (
    CONTEXT,
    FIRST_STAMP,
    FORK_TOKENS,
    HALF_TOKENS,
    HEADER,
    HEADER_BYTES,
    KEY,
    KEYRING,
    SESSION_TOKENS,
    SHARED_TOKENS,
    block_chunks,
    ids_of,
    lineage_of,
    manifest_of,
)
from kvpack.chunk.seal import seal_token_ids
from kvpack.store import (
    Budget,
    CutReader,
    CutWriter,
    GcPolicy,
    HoldKind,
    LocalStore,
    WriterTools,
    check_store,
    cuts_of,
    find_deepest,
    open_store,
    plan_gc,
    release_session,
    tidy_store,
)
from kvpack.store.steps import drive
from kvpack.store.sweep import SWEEP_NAMES, sweep_once

NOW = FIRST_STAMP + (1 << 24)
_BUDGET = Budget(1 << 50, 0)

Figures = dict[str, object]


def _nothing() -> None:
    """Nobody is waited for."""


def _ms(times: list[float]) -> Figures:
    ordered = sorted(times)
    return {
        "median_ms": statistics.median(times) * 1e3,
        "p95_ms": ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)] * 1e3,
        "least_ms": ordered[0] * 1e3,
    }


@contextmanager
def _opened(path: Path) -> Iterator[LocalStore]:
    store = open_store(path)
    try:
        yield store
    finally:
        store.close()


def start(path: Path, sessions: int, forks: int) -> Figures:
    """Open the store and do the scan that a node does when it starts."""
    begun, cpu = time.perf_counter(), time.process_time()
    with _opened(path) as store:
        opened = time.perf_counter()
        tidy_store(store, NOW, _nothing)
        return {
            "open_ms": (opened - begun) * 1e3,
            "tidy_ms": (time.perf_counter() - opened) * 1e3,
            "start_cpu_ms": (time.process_time() - cpu) * 1e3,
        }


def _prompts(sessions: int, forks: int) -> dict[str, Callable[[int], tuple[tuple[int, ...], int]]]:
    """For a round: a prompt, and at which token the deepest cut of it lies."""
    fork_end = SHARED_TOKENS + FORK_TOKENS

    def hit(number: int) -> tuple[tuple[int, ...], int]:
        return (*ids_of(number * 7919 % sessions), *range(10)), SESSION_TOKENS

    def leaves(number: int) -> tuple[tuple[int, ...], int]:
        ids = ids_of(number * 7919 % sessions)[: HALF_TOKENS + 1000]
        return (*ids, *range(1000)), HALF_TOKENS

    def miss(number: int) -> tuple[tuple[int, ...], int]:
        return tuple(range(number, number + SESSION_TOKENS)), 0

    def fork(number: int) -> tuple[tuple[int, ...], int]:
        return (*ids_of(sessions + number * 7919 % forks)[:fork_end], *range(100)), fork_end

    def again(_: int) -> tuple[tuple[int, ...], int]:
        return hit(0)

    return {"hit": hit, "again": again, "leaves": leaves, "miss": miss, "fork": fork}


def lookup(path: Path, sessions: int, forks: int, rounds: int = 40) -> Figures:
    """The deepest cut of a prompt: whole sessions, prompts that leave one, of none, of a fork."""
    found: Figures = {}
    with _opened(path) as store:
        prompts = _prompts(sessions, forks)
        begun = time.perf_counter()
        find_deepest(store, KEYRING, KEY, HEADER, prompts["hit"](0)[0])
        found["lookup_first_ms"] = (time.perf_counter() - begun) * 1e3
        times: dict[str, list[float]] = {name: [] for name in prompts}
        cpu: dict[str, list[float]] = {name: [] for name in prompts}
        for number, (name, make) in itertools.product(range(rounds), prompts.items()):
            ids, expected = make(number)
            begun, used = time.perf_counter(), time.process_time()
            answer = find_deepest(store, KEYRING, KEY, HEADER, ids)
            times[name].append(time.perf_counter() - begun)
            cpu[name].append(time.process_time() - used)
            if answer.position != expected or answer.misses:
                raise AssertionError(f"{name}: {answer.position} of {expected}, {answer.misses}")
    for name, taken in times.items():
        found |= {f"{name}_{key}": value for key, value in _ms(taken).items()}
        found[f"{name}_cpu_ms"] = statistics.median(cpu[name]) * 1e3
        found[f"{name}_each_ms"] = [round(value * 1e3, 4) for value in taken]
    found["lookup_peak_mib"] = resident_peak_bytes() / (1 << 20)
    return found


def save(path: Path, sessions: int, forks: int, rounds: int = 10) -> Figures:
    """Add a block and a turn to a session: 9 new chunks, a cut, its hold, a node, its entry.

    Beside it in turns the bare files of such a save: as many, each flushed, then linked.
    """
    ours: list[float] = []
    bare: list[float] = []
    spent: list[float] = []
    stamp = time.time_ns()
    with _opened(path) as store:
        for number in range(rounds + 1):
            seed = number % sessions
            hold = next(h for h in cuts_of(store, lineage_of(seed)) if h.position == SESSION_TOKENS)
            known = CutReader(store, KEYRING, hold.cut_id).cut.manifest.references
            ids = (*ids_of(seed), *(stamp % 40_000 + index for index in range(200)))
            chunks = [
                *block_chunks((stamp + number) % (1 << 31), SESSION_TOKENS, 200),
                *seal_token_ids(CONTEXT, ids[SESSION_TOKENS:], SESSION_TOKENS),
            ]
            begun, cpu = time.perf_counter(), time.process_time()
            tools = WriterTools(os.urandom(16), lambda: NOW, _nothing, _BUDGET)
            with CutWriter(store, KEYRING, HEADER_BYTES, tools) as writer:
                writer.reserve(sum(len(chunk.object) for chunk in chunks) + 100_000)
                added = writer.add(chunks)
                writer.rely(known)
                manifest = manifest_of(len(ids), [*known, *added])
                writer.publish(manifest, lineage_of(1 << 40), HoldKind.TURN, ids)
            took, used = time.perf_counter() - begun, time.process_time() - cpu
            bare_took = _bare_files(path.parent, [chunk.object for chunk in chunks])
            if number:
                ours.append(took)
                bare.append(bare_took)
                spent.append(used)
            else:
                first, first_cpu = took, used
        release_session(store, lineage_of(1 << 40))
    return {f"save_{name}": value for name, value in _ms(ours).items()} | {
        "save_cpu_ms": statistics.median(spent) * 1e3,
        "save_first_ms": first * 1e3,
        "save_first_cpu_ms": first_cpu * 1e3,
        "save_bare_ms": statistics.median(bare) * 1e3,
        "save_against_bare": statistics.median(a / b for a, b in zip(ours, bare, strict=True)),
    }


def _bare_files(folder: Path, objects: list[bytes]) -> float:
    """Seconds to make files durable and visible one by one."""
    begun = time.perf_counter()
    for number, data in enumerate(objects):
        name, final = folder / f"bare-{number}.tmp", folder / f"bare-{number}"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
        final.hardlink_to(name)
        name.unlink()
        final.unlink()
    return time.perf_counter() - begun


def plan(path: Path, sessions: int, forks: int) -> Figures:
    """Mark everything: what a collector would do. Then one sweep of 4,096 names."""
    before = resident_peak_bytes()
    with _opened(path) as store:
        begun, cpu = time.perf_counter(), time.process_time()
        made = plan_gc(store, NOW, GcPolicy(_BUDGET))
        figures: Figures = {
            "plan_ms": (time.perf_counter() - begun) * 1e3,
            "plan_cpu_ms": (time.process_time() - cpu) * 1e3,
            "garbage": float(len(made.garbage)),
            "plan_peak_mib": (resident_peak_bytes() - before) / (1 << 20),
        }
        condemned = [item.name for item in made.garbage][:SWEEP_NAMES]
        condemned += [f"chunks/{number:064x}" for number in range(SWEEP_NAMES - len(condemned))]
        begun, cpu = time.perf_counter(), time.process_time()
        with store.collector():
            steps = sweep_once(
                condemned, made.dropped_names, os.urandom(16), made.cache, 256, made.live_cuts
            )
            drive(store, steps, _nothing)
        figures["step_ms"] = (time.perf_counter() - begun) * 1e3
        figures["step_cpu_ms"] = (time.process_time() - cpu) * 1e3
    return figures


def check(path: Path, sessions: int, forks: int) -> Figures:
    """Open every chunk and look at every name."""
    before = resident_peak_bytes()
    progress: list[float] = []
    begun, cpu = time.perf_counter(), time.process_time()
    objects = 0

    def told(_: int) -> None:
        nonlocal objects
        objects += 1
        if not progress:
            progress.append(time.perf_counter() - begun)

    with _opened(path) as store:
        findings = sum(1 for _ in check_store(store, KEYRING, progress=told))
    return {
        "check_ms": (time.perf_counter() - begun) * 1e3,
        "check_cpu_ms": (time.process_time() - cpu) * 1e3,
        "check_first_ms": progress[0] * 1e3 if progress else -1.0,
        "objects": float(objects),
        "findings": float(findings),
        "check_peak_mib": (resident_peak_bytes() - before) / (1 << 20),
    }


CASES: dict[str, Callable[[Path, int, int], Figures]] = {
    "start": start,
    "lookup": lookup,
    "save": save,
    "plan": plan,
    "check": check,
}


def main() -> None:
    """Do one case and print its figures."""
    case, path, sessions, forks = sys.argv[1:]
    json.dump(CASES[case](Path(path), int(sessions), int(forks)), sys.stdout)


if __name__ == "__main__":
    main()
