"""Peak memory of one piece of work, above what the imports take, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.format.pack import KEYRING, PUBLIC, SIGNER, position_of, state_of, write_pack
from kvpack.bundle import BundleReader, Depth, ForwardReader, publish_new
from kvpack.chunk import Codec
from kvpack.verify import verify_bundle, verify_signature, verify_stream

LIMIT_MIB = 64.0

# What the codec loads on first use counts as an import; kvpack does without it too.
with contextlib.suppress(ImportError):
    importlib.import_module("numpy")


@dataclass(frozen=True)
class MemoryRow:
    """Peak of one case, in MiB above import, for a pack of some size."""

    case: str
    pack_mib: int
    peak_mib: float

    def markdown(self) -> str:
        """A line of the table."""
        verdict = "met" if self.peak_mib <= LIMIT_MIB else "not met"
        return f"| {self.case} | {self.pack_mib} | {self.peak_mib:.1f} | <= 64 | {verdict} |"


def _read(path: Path) -> None:
    with BundleReader.open(path, KEYRING) as reader:
        for _ in reader.chunks():
            pass


def _read_forward(path: Path) -> None:
    with io.FileIO(path) as stream, tempfile.TemporaryFile(buffering=0, dir=path.parent) as spool:
        for _ in ForwardReader(stream, KEYRING, spool).chunks():
            pass


def _forward(path: Path, depth: Depth) -> None:
    with io.FileIO(path) as stream:
        verify_stream(stream, KEYRING, depth)


def _write(path: Path, codec: Codec) -> None:
    mib = round(path.stat().st_size / (1 << 20))
    target = path.with_name(f"written-{os.getpid()}")
    state = state_of(position_of(mib << 20), compressible=codec is not Codec.RAW)
    with publish_new(target) as sink:
        write_pack(sink, state, codec=codec, signer=SIGNER)
    target.unlink()


CASES: dict[str, Callable[[Path], object]] = {
    "verify --quick": lambda path: verify_bundle(path, KEYRING, Depth.QUICK),
    "verify": lambda path: verify_bundle(path, KEYRING, threads=2),
    "verify --deep": lambda path: verify_bundle(path, KEYRING, Depth.DEEP, threads=2),
    "verify --signer": lambda path: verify_signature(path, PUBLIC, threads=2),
    "verify --deep --key --signer": lambda path: verify_bundle(
        path, KEYRING, Depth.DEEP, signer=PUBLIC, threads=2
    ),
    "verify -": lambda path: _forward(path, Depth.FULL),
    "verify --deep -": lambda path: _forward(path, Depth.DEEP),
    "read, every chunk": _read,
    "read forwards through a spool": _read_forward,
    "seal, sign and write": lambda path: _write(path, Codec.RAW),
    "seal, sign and write zstd": lambda path: _write(path, Codec.ZSTD_SPLIT),
}

#: These are also run on a pack of compressed chunks, each of which has to be decoded whole.
ZSTD_CASES = ("verify", "verify --deep", "read, every chunk")


def peak_mib(case: str, path: Path) -> float:
    """Run ``case`` in a fresh process."""
    command = [sys.executable, "-m", "bench.format.memory", case, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return float(done.stdout)


def resident_peak_bytes() -> int:
    """The most that this process ever had in memory."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: its figure begins with that of the process that started this one.
        words = status.read_text().split()
        return int(words[words.index("VmHWM:") + 1]) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Do one case and print its peak."""
    case, path = sys.argv[1:]
    before = resident_peak_bytes()
    CASES[case](Path(path))
    print((resident_peak_bytes() - before) / (1 << 20))


if __name__ == "__main__":
    main()
