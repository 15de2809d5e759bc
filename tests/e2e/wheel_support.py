"""Nodes of another build: its wheel, unpacked into a folder, run by this interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e_support import ROOT, bound, environment

from node.client import NodeClient
from node.config import Address

START_S = 40.0
STOP_S = 20.0


@dataclass(frozen=True)
class Build:
    """Where the packages of one build lie. What they need comes from this interpreter."""

    folder: Path

    @classmethod
    def unpacked(cls, wheel: Path, folder: Path) -> Build:
        """The build in ``wheel``, in a folder of its own."""
        _pip("install", "--no-deps", "--no-compile", "--target", str(folder), str(wheel))
        build = cls(folder)
        # Not the checkout, which is installed here, too.
        ran = subprocess.run(
            [sys.executable, "-P", "-c", "import node; print(node.__file__)"],
            env=build.environment(), capture_output=True, text=True, check=True,
            timeout=bound(START_S),
        )  # fmt: skip
        assert Path(ran.stdout.strip()).is_relative_to(folder), ran.stdout
        return build

    def environment(self) -> dict[str, str]:
        return {**environment(), "PYTHONPATH": str(self.folder)}

    @contextlib.asynccontextmanager
    async def node(self, stage, name: str, client: str):
        """``kvnode serve`` of this build, and a client of the checkout that speaks to it."""
        with stage.log(name).open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "node", "serve",
                *stage.serve_arguments(name, "127.0.0.1:0"), "--stop-on-stdin-end",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=sink,
                env=self.environment(), cwd=stage.work,
            )  # fmt: skip
        try:
            async with asyncio.timeout(bound(START_S)):
                line = await process.stdout.readline()
            assert line, stage.log(name).read_text()[-2000:]
            address = Address.parse(json.loads(line)["address"])
            async with NodeClient(stage.credentials(client), name, address) as asking:
                yield address, asking
        finally:
            process.stdin.close()
            try:
                async with asyncio.timeout(bound(STOP_S)):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout. Its build needs no network: the back end is installed."""
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(*arguments: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check",
         "--no-index"],
        env={**os.environ, "PIP_NO_INPUT": "1"}, capture_output=True, text=True, check=False,
        timeout=bound(120.0),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
