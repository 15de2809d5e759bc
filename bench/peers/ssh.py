"""A daemon of ssh on loopback with keys that are thrown away: what scp and rsync talk to."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.measured import FAILED, NOT_INSTALLED
from bench.turns import NoFigureError

_START_S = 10.0
_COPY_S = 120.0

#: Where root's sshd has to have an empty folder; other systems bring it.
_PRIVILEGES = Path("/run/sshd")


@dataclass(frozen=True)
class Ssh:
    """A running daemon."""

    port: int
    folder: Path

    def copy(self, tool: str, source: Path, target: Path, cipher: str = "") -> None:
        """Copy a file by ``scp`` or ``rsync`` from here to here.

        Raises:
            NoFigureError: The tool is not there, or failed.
        """
        place = f"{getpass.getuser()}@127.0.0.1:{target}"
        options = [*self._options(), *(["-c", cipher] if cipher else [])]
        if tool == "scp":
            command = ["scp", "-q", "-P", str(self.port), *options, str(source), place]
        else:
            through = " ".join(["ssh", "-p", str(self.port), *options])
            command = ["rsync", "-W", "-e", through, str(source), place]
        _require(tool)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_COPY_S, check=False)
        if ran.returncode:
            raise NoFigureError(FAILED, f"{tool}: {ran.stderr.strip()}")

    def _options(self) -> list[str]:
        pairs = {
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "BatchMode": "yes",
        }
        chosen = [part for name, value in pairs.items() for part in ("-o", f"{name}={value}")]
        return ["-F", "/dev/null", *chosen, "-i", str(self.folder / "user")]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Ssh]:
    """A daemon for this user, until the block ends.

    Raises:
        NoFigureError: There is no sshd here, or it did not start.
    """
    daemon = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if daemon is None:
        raise NoFigureError(NOT_INSTALLED, "sshd (openssh-server)")
    _require("ssh-keygen")
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True, timeout=_START_S)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "authorized").chmod(0o600)
    made = os.geteuid() == 0 and not _PRIVILEGES.exists()
    if made:
        _PRIVILEGES.mkdir(mode=0o755)
    port = _free_port()
    settings = {
        "ListenAddress": "127.0.0.1", "Port": port, "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized", "StrictModes": "no", "UsePAM": "no",
        "PermitRootLogin": "prohibit-password", "PasswordAuthentication": "no",
        "Subsystem": "sftp internal-sftp", "PidFile": "none",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    process = subprocess.Popen(
        [daemon, "-D", "-e", "-f", str(folder / "config")],
        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(port, process)
        yield Ssh(port, folder)
    finally:
        process.terminate()
        process.wait()
        if made:
            with contextlib.suppress(OSError):
                _PRIVILEGES.rmdir()


def _require(tool: str) -> None:
    if shutil.which(tool) is None:
        raise NoFigureError(NOT_INSTALLED, tool)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise NoFigureError(FAILED, "sshd did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
