"""A slow, lossy or cut network of packets between two namespaces, carried in user space.

Each namespace has a TUN device whose packets this process hands to the other one: late, a few at a
time, or not at all. So TCP itself meets the loss, and no kernel module (``sch_netem``) is needed.
A second, clean link leads from here to each namespace, for the client and the checks.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES = 1 << 16

#: What a router holds before it drops, at the rate of the link.
QUEUE_S = 0.2


@dataclass(frozen=True)
class Weather:
    """How the network is.

    Attributes:
        name: For the table.
        delay_s: One way.
        loss: Part of the packets that never arrive, both ways.
        bits_per_s: Each way; 0 for no bound.
    """

    name: str
    delay_s: float = 0.0
    loss: float = 0.0
    bits_per_s: float = 0.0


FAIR = Weather("fair")
CUT = Weather("cut", loss=1.0)


@dataclass(frozen=True)
class Place:
    """One namespace, and how it is reached from here and from the other one."""

    namespace: str
    here: str
    there: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)


class Air:
    """Carries packets between two namespaces; ``weather`` may be changed at any time."""

    def __init__(self, seed: int = 1) -> None:
        self.weather = FAIR
        self.carried = 0
        self.lost = 0
        self._draw = random.Random(seed)
        self._ends: list[int] = []
        self._line: list[tuple[float, int, int, bytes]] = []
        self._free_s = [0.0, 0.0]
        self._count = 0
        self._stop = threading.Event()

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Place, Place]]:
        """Both namespaces, until the block ends.

        Raises:
            OSError: This machine does not permit them.
            subprocess.CalledProcessError: Nor does ``ip``.
        """
        places = (
            Place(f"kvf{os.getpid()}a", "10.213.1.2", "10.213.0.1"),
            Place(f"kvf{os.getpid()}b", "10.213.2.2", "10.213.0.2"),
        )
        with contextlib.ExitStack() as stack:
            for number, place in enumerate(places, 1):
                _ip("netns", "add", place.namespace)
                stack.callback(_ip, "netns", "del", place.namespace)
                self._ends.append(_tun(place))
                stack.callback(os.close, self._ends[-1])
                _clean_link(place, number)
            carrier = threading.Thread(target=self._carry, daemon=True)
            carrier.start()
            stack.callback(carrier.join, 5.0)
            stack.callback(self._stop.set)
            yield places

    def _carry(self) -> None:
        while not self._stop.is_set():
            now = time.monotonic()
            while self._line and self._line[0][0] <= now:
                _, _, end, packet = heapq.heappop(self._line)
                # A device whose queue is full, or that is gone, loses the packet as others do.
                with contextlib.suppress(OSError):
                    os.write(end, packet)
            wait_s = min(0.05, self._line[0][0] - now) if self._line else 0.05
            ready, _, _ = select.select(self._ends, [], [], max(0.0, wait_s))
            for end in ready:
                with contextlib.suppress(BlockingIOError):
                    self._take(self._ends.index(end), os.read(end, PACKET_BYTES))

    def _take(self, way: int, packet: bytes) -> None:
        weather, due = self.weather, time.monotonic()
        if weather.bits_per_s:
            self._free_s[way] = max(due, self._free_s[way]) + 8 * len(packet) / weather.bits_per_s
            if self._free_s[way] - due > QUEUE_S:
                self._free_s[way] -= 8 * len(packet) / weather.bits_per_s
                self.lost += 1
                return
            due = self._free_s[way]
        if self._draw.random() < weather.loss:
            self.lost += 1
            return
        self._count += 1
        self.carried += 1
        entry = (due + weather.delay_s, self._count, self._ends[1 - way], packet)
        heapq.heappush(self._line, entry)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tun(place: Place) -> int:
    name = place.namespace
    end = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    _ip("link", "set", name, "netns", place.namespace)
    _ip("-n", place.namespace, "addr", "add", f"{place.there}/30", "dev", name)
    _ip("-n", place.namespace, "link", "set", name, "up")
    return end


def _clean_link(place: Place, number: int) -> None:
    ours = f"{place.namespace}v"
    _ip("link", "add", ours, "type", "veth", "peer", "name", "clean", "netns", place.namespace)
    _ip("addr", "add", f"10.213.{number}.1/30", "dev", ours)
    _ip("link", "set", ours, "up")
    _ip("-n", place.namespace, "addr", "add", f"{place.here}/30", "dev", "clean")
    for device in ("clean", "lo"):
        _ip("-n", place.namespace, "link", "set", device, "up")
