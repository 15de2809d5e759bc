"""What a node process is told: its options, and the few process-wide settings.

The only file that reads or writes the environment.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvpack.store import Budget
from node.errors import UsageError
from node.s3.place import S3Place
from node.serving.options import ServingOptions

if TYPE_CHECKING:
    from node.dataplane.options import PlaneOptions
    from node.http.options import HttpOptions

#: TLS 1.2 suites that need an RSA certificate. Ours are ECDSA (:mod:`node.enroll`), so no TLS 1.2
#: handshake can find a suite: grpc-python has no option for a lowest version.
_RSA_ONLY_SUITES: Final = "ECDHE-RSA-AES256-GCM-SHA384"

#: A node's lease, from the moment its renewal was sent (:mod:`node.lease`).
LEASE_S: Final = 15.0

#: The slowest durable write that a node's volume may need (:mod:`node.volume`).
VOLUME_WORST_S: Final = 0.1

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_MADV_HUGEPAGE: Final = 14
_LARGE_PAGE_BYTES: Final = 2 << 20

#: Of address space. Below the thresholds of :func:`tune_malloc`: a larger block is mapped, and a
#: longer end of the heap is given back at once.
_HEAP_BLOCK_BYTES: Final = 768 << 20
_HEAP_BLOCKS: Final = 2


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen or connect. ``port`` 0 lets the system choose.

    Raises:
        UsageError: Not ``HOST:PORT`` with a port of 0 to 65,535.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:PORT`` or ``[IPv6]:PORT``."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or len(port) > 5:
            raise UsageError(f"address {text!r}: expected HOST:PORT")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise UsageError(f"port {self.port}: expected 0 to 65535")
        if not self.host or not self.host.isprintable() or " " in self.host:
            raise UsageError(f"host {self.host!r}: expected a name or an address")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of ``kvnode serve``.

    Attributes:
        address: Where to listen for gRPC; None: nowhere.
        model_dir: The model.
        data_dir: This node's own files.
        credentials_dir: Made by ``kvnode enroll`` or ``kvnode pair``; None where it needs none.
        directory_url: Who owns what; :func:`node.directory.open_directory` says how it is written.
        volume_worst_s: How slow the data folder may be at its worst.
        lease_s: How long this node's lease runs without a renewal.
        share_directory: Serve the directory file to other nodes.
        transfer_lease_s: How long a transfer into this node may make no progress.
        store: What a store of cuts may take.
        store_roots: Folders and places in buckets below which clients may have sessions put into
            stores.
        http: Where to listen for HTTP, and for whom; None: nowhere.
        serving: Slots, context and cache.
        advertise: Where other nodes reach this one for gRPC; None: where it listens.
        kv_bytes: KV memory for sessions, by which they are placed; None: half of the machine's.
        planes: Data planes without TLS, for whom, and where to; None: there is none.
        device: ``cpu`` or ``gpu`` to compute on; None: what MLX takes by itself.

    Raises:
        UsageError: It would listen nowhere, or for gRPC without credentials.
    """

    address: Address | None
    model_dir: Path
    data_dir: Path
    credentials_dir: Path | None
    directory_url: str
    volume_worst_s: float = VOLUME_WORST_S
    lease_s: float = LEASE_S
    share_directory: bool = False
    transfer_lease_s: float = 60.0
    store: Budget = field(default_factory=Budget)
    store_roots: tuple[Path | S3Place, ...] = ()
    http: HttpOptions | None = None
    serving: ServingOptions = field(default_factory=ServingOptions)
    advertise: Address | None = None
    kv_bytes: int | None = None
    planes: PlaneOptions | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.address is None and self.http is None:
            raise UsageError("serve: expected an address for gRPC, for HTTP, or for both")
        if self.address is not None and self.credentials_dir is None:
            raise UsageError("--grpc: needs --credentials")


def prepare_process() -> None:
    """Settings that must be made before gRPC is imported. Called by the command, not on import.

    TLS below 1.3 is shut off, gRPC's own log is silenced (ours states refusals), and glibc's
    malloc is told to keep large buffers: without that every message of some MiB is mapped,
    faulted in and unmapped again, which halves the throughput.

    Raises:
        RuntimeError: gRPC was imported before, so it has read its environment already.
    """
    if not tls13_only() and "grpc" in sys.modules:
        raise RuntimeError("prepare_process() must run before gRPC is imported")
    os.environ["GRPC_SSL_CIPHER_SUITES"] = _RSA_ONLY_SUITES
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    tune_malloc()


def fault_order() -> str:
    """What a process that was started for a test is to do where (:mod:`node.fault_points`)."""
    return os.environ.get("KVPACK_FAULT", "")


def notify_socket() -> str:
    """Where the service manager that started us wants to hear how far we are; empty: nowhere.

    Taken out of the environment: a child of ours would speak for us.
    """
    return os.environ.pop("NOTIFY_SOCKET", "")


def let_grpc_speak() -> None:
    """Let gRPC write its log, for :mod:`node.handshakes` to read. Before gRPC is imported.

    Whoever set another level wants to see gRPC's own words, and keeps it.
    """
    if os.environ.get("GRPC_VERBOSITY") == "NONE":
        os.environ["GRPC_VERBOSITY"] = "INFO"


def aws_environment() -> tuple[dict[str, str], Path]:
    """What the process was told about AWS, and the user's home, where files of AWS tools lie."""
    return {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}, Path.home()


def default_data_dir(model_dir: Path) -> Path:
    """Where a node keeps its files that was not told: a folder of the user's, one for each model.

    The name of the model's folder is in it for people, and a digest of its place, so that two
    folders of one name do not meet.
    """
    if platform.system() == "Darwin":
        parent = Path.home() / "Library" / "Application Support"
    else:
        parent = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    place = model_dir.resolve()
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
    return parent / "kvpack" / f"{place.name}-{digest}"


def tls13_only() -> bool:
    """Whether :func:`prepare_process` has shut off older TLS."""
    return os.environ.get("GRPC_SSL_CIPHER_SUITES") == _RSA_ONLY_SUITES


def child_environment(package_parent: Path) -> dict[str, str]:
    """The environment for a child process of ours: it imports the same packages as we do."""
    environment = dict(os.environ)
    inherited = environment.get("PYTHONPATH")
    paths = [str(package_parent), *([inherited] if inherited else [])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def tune_malloc() -> None:
    """Let glibc keep large buffers, as a process that serves does; nothing on another system."""
    libc = _glibc()
    if libc is None:
        return
    # Each of the first two alone is slower than neither (limits of the data plane, section 4).
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    libc.mallopt(_M_TOP_PAD, 64 << 20)
    # Threads get arenas of their own otherwise, for which the thresholds do not hold: a chunk that
    # was opened on a worker was unmapped and faulted in again, and each arena kept its own peak.
    libc.mallopt(_M_ARENA_MAX, 1)


def widen_heap() -> None:
    """Let what the heap grows by from here on lie in large pages. For a process that is a node.

    The first stream makes it grow by 30 to 60 MB, of which each small page is a fault on its way:
    5,000 to 20,000 for a GB, and some hundred with large ones. Only address space is taken: what
    is never used takes no memory. Does nothing without glibc and :func:`tune_malloc`, or where the
    system refuses.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [libc.malloc(_HEAP_BLOCK_BYTES) for _ in range(_HEAP_BLOCKS)]
    for block in filter(None, blocks):
        first = -(-block // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
        end = (block + _HEAP_BLOCK_BYTES) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
        libc.madvise(first, end - first, _MADV_HUGEPAGE)
    # From the end on, so that each joins the heap's end again.
    for block in reversed(blocks):
        libc.free(block)


def _glibc() -> ctypes.CDLL | None:
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") else None
