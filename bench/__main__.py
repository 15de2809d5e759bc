"""``python -m bench``: every group in turn, each in a process of its own, and one JSON of all."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.groups import GROUPS, SLOW_GROUPS
from bench.machine import describe, load
from bench.measured import FAILED, MEASURED, TIMED_OUT
from bench.stage import end_descendants, stage
from bench.table import as_page
from bench.verdict import ROUNDS_MIN

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

TOKENS = 32_769
LARGE_TOKENS = 130_815
QUICK_TOKENS = 2_048
_ROUNDS = 5
_QUICK_ROUNDS = 3

#: A group begins nothing that would not fit; what takes longer than the time before is ended then.
_BEYOND_S = 30.0


def main() -> None:
    """Parse, measure, write."""
    options = _parser().parse_args()
    groups, only = _chosen(options)
    begun = time.monotonic()
    found = _kept(options)
    try:
        with stage(options.folder) as folder:
            found |= {
                "schema": 1,
                "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "quick": options.quick,
                "machine": describe(),
            }
            for name, limit_s in groups.items():
                _told(f"{name}: at most {limit_s:.0f} s")
                found["groups"][name] = _measure(name, limit_s, options, only[name], folder)
            found["seconds"] = round(time.monotonic() - begun, 1)
            if options.out is not None:
                _publish(options.out, found, folder)
    except KeyboardInterrupt:
        sys.stderr.write("bench: error: interrupted: no result was written\n")
        raise SystemExit(130) from None
    print(as_page(found))
    if options.out is not None:
        print(f"\n{options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", default=[],
        help="a group, or GROUP:CONTENDER beside the group's references; several times",
    )  # fmt: skip
    parser.add_argument("--slow", action="store_true", help="what takes long to install or to run")
    parser.add_argument("--quick", action="store_true", help="small payloads, few rounds: a look")
    parser.add_argument("--rounds", type=int, help=f"default {_ROUNDS}, and {_QUICK_ROUNDS}")
    parser.add_argument("--tokens", type=int, help=f"of the usual cache; default {TOKENS}")
    parser.add_argument("--large-tokens", type=int, help=f"of the headline; default {LARGE_TOKENS}")
    parser.add_argument("--out", type=Path, default=None, help="JSON; default: no file is kept")
    parser.add_argument(
        "--resume", action="store_true", help="keep what --out has of groups not asked for now"
    )
    parser.add_argument(
        "--folder", type=Path, help="where payloads are put; default: as TMPDIR says"
    )
    return parser


def _chosen(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, set[str]]]:
    """Limits of the groups, and of each whom alone; nobody there: all of it."""
    every = GROUPS | SLOW_GROUPS
    only: dict[str, set[str]] = {name: set() for name in every}
    groups, whole = {}, set()
    for asked in options.only:
        group, _, contender = asked.partition(":")
        if group not in every:
            _refuse(f"--only {asked}: expected one of {', '.join(every)}")
        groups[group] = every[group]
        only[group] |= {contender} if contender else set()
        whole |= set() if contender else {group}
    for name in whole:
        only[name] = set()
    if not groups:
        groups = every if options.slow else GROUPS
    for field in ("rounds", "tokens", "large_tokens"):
        given = getattr(options, field)
        if given is not None and given < 2:
            _refuse(f"--{field.replace('_', '-')}: expected at least 2, found {given}")
    if options.folder is not None and not options.folder.is_dir():
        _refuse(f"--folder: expected a folder, found {options.folder}")
    if options.out is not None and not options.out.resolve().parent.is_dir():
        _refuse(f"--out: there is no folder {options.out.parent}")
    return dict(groups), only


def _refuse(message: str) -> None:
    sys.stderr.write(f"bench: error: {message}\n")
    raise SystemExit(2)


def _kept(options: argparse.Namespace) -> dict[str, Any]:
    if not options.resume:
        return {"groups": {}}
    if options.out is None or not options.out.is_file():
        _refuse("--resume: expected the file of an earlier run as --out")
    kept: dict[str, Any] = json.loads(options.out.read_text())
    return kept


def _measure(
    name: str, limit_s: float, options: argparse.Namespace, only: set[str], folder: Path
) -> dict[str, Any]:
    """Run one group; what it leaves of processes and files is cleared away."""
    quick = options.quick
    own = folder / name
    own.mkdir()
    order = {
        "folder": str(own),
        "tokens": options.tokens or (QUICK_TOKENS if quick else TOKENS),
        "large_tokens": options.large_tokens or (QUICK_TOKENS if quick else LARGE_TOKENS),
        "rounds": options.rounds or (_QUICK_ROUNDS if quick else _ROUNDS),
        "quick": quick,
        "limit_s": limit_s,
        "only": sorted(only),
    }
    result, begun, before = own / "result.json", time.monotonic(), load()
    log = folder / f"{name}.log"
    status, reason = MEASURED, ""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.group", name, json.dumps(order), str(result)],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=os.environ,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s + _BEYOND_S)
        except subprocess.TimeoutExpired:
            status, reason = ended(result, limit_s + _BEYOND_S)
        else:
            if code:
                lines = log.read_text(errors="replace").strip().splitlines()
                status, reason = FAILED, lines[-1] if lines else f"ended with {code}"
    end_descendants()
    contenders = json.loads(result.read_text()) if result.is_file() else []
    _remove(own)
    if reason:
        _told(f"{name}: {status}: {reason}")
    for contender in contenders:
        if contender["status"] != "measured":
            _told(f"  {contender['name']}: {contender['status']}: {contender['reason']}")
    return {
        "status": status,
        "reason": reason,
        "seconds": round(time.monotonic() - begun, 1),
        "load_before": before,
        "load_after": load(),
        "tokens": order["tokens"],
        "large_tokens": order["large_tokens"],
        "contenders": contenders,
    }


def ended(result: Path, after_s: float) -> tuple[str, str]:
    """Status and reason of a group that was ended: what it had measured by then stays."""
    contenders = json.loads(result.read_text()) if result.is_file() else []
    rounds = max((len(one["samples"]) for one in contenders), default=0)
    reason = f"not done in {after_s:.0f} s"
    if rounds < ROUNDS_MIN:
        return TIMED_OUT, reason
    return MEASURED, f"{reason}: the last round is not whole"


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _publish(path: Path, found: dict[str, Any], folder: Path) -> None:
    """Whole or not at all: an interrupt leaves no half of it."""
    fresh = path.with_name(f".{path.name}.{folder.name}")
    try:
        fresh.write_text(json.dumps(found, indent=1) + "\n")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _told(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
