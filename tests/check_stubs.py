"""Regenerate the protobuf stubs and compare them with the committed ones (``--write``: replace).

Exit 1 names the first stub that differs, so a changed ``.proto`` cannot land without its stubs.
"""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: ``-I<package>=<folder>``: the stubs then import each other by their real package name.
TREES = (("kvpack/pb", "proto/kvpack"), ("node/pb", "proto/node"))


def generate(out: Path) -> None:
    for package, folder in TREES:
        sources = sorted((ROOT / folder).rglob("*.proto"))
        if not sources:
            continue
        names = [f"{package}/{p.relative_to(ROOT / folder).as_posix()}" for p in sources]
        services = "node" in package
        command = [
            sys.executable, "-m", "grpc_tools.protoc",
            f"-I{package}={ROOT / folder}",
            *(f"-I{other}={ROOT / source}" for other, source in TREES if other != package),
            f"--python_out={out}",
            f"--mypy_out={out}",
            *([f"--grpc_python_out={out}", f"--mypy_grpc_out={out}"] if services else []),
            *names,
        ]  # fmt: skip
        environment_path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        subprocess.run(
            command, check=True, cwd=ROOT, env={"PATH": environment_path}, capture_output=True
        )


def main() -> int:
    write = "--write" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        generate(out)
        fresh = {p.relative_to(out) for p in out.rglob("*.py*")}
        if write:
            for name in sorted(fresh):
                target = ROOT / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(out / name, target)
                for folder in (target.parent, target.parent.parent):
                    (folder / "__init__.py").touch()
            return 0
        stale = sorted(
            str(name)
            for name in fresh
            if not (ROOT / name).exists() or not filecmp.cmp(out / name, ROOT / name, shallow=False)
        )
        for name in stale:
            sys.stderr.write(f"{name}: differs from its .proto; run make proto\n")
        return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
