"""Two sides of a pairing: as processes with terminals, as threads, and one that is scripted."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from kvpack.errors import KvpackError
from node.config import Address
from node.credentials import Role
from node.pair import agreement as agree
from node.pair import talk
from node.pair.agreement import Box, Share
from node.pair.console import Console
from node.pair.line import Deadline, SealedLine, accept_one, connect, listen
from node.pair.messages import decode_offer, encode_offer
from node.pair.party import Wish, prepare

#: A bound, never waited for: machines that run tests may be busy.
SECONDS = 60.0
HOST = "127.0.0.1"


def files_of(folder: Path) -> list[str]:
    """Every file and folder below, by name."""
    return sorted(str(path) for path in folder.rglob("*"))


class Side:
    """One end of a pairing in a thread, with a terminal that the test reads and types on."""

    def __init__(self, work, wish: Wish, address: Address, seconds: float) -> None:
        self.shown: queue.Queue[str] = queue.Queue()
        self.lines: list[str] = []
        self.paired = None
        self.error: KvpackError | None = None
        self._read, self._write = os.pipe()
        console = Console(self._read, self.shown.put)

        def target() -> None:
            try:
                self.paired = work(wish, address, seconds, console)
            except KvpackError as error:
                self.error = error

        self._thread = threading.Thread(target=target, daemon=True)
        self._thread.start()

    @classmethod
    def listen(cls, wish: Wish, seconds: float = SECONDS) -> Side:
        side = cls(talk.listen_and_pair, wish, Address(HOST, 0), seconds)
        side.address = Address.parse(side.wait_for("listening on ").split()[0])
        return side

    @classmethod
    def join(cls, wish: Wish, address: Address, seconds: float = SECONDS) -> Side:
        return cls(talk.join_and_pair, wish, address, seconds)

    def wait_for(self, start: str) -> str:
        """The rest of the first line that begins so."""
        while True:
            self.lines.append(self.shown.get(timeout=SECONDS))
            if self.lines[-1].startswith(start):
                return self.lines[-1].removeprefix(start).strip()

    def code(self) -> str:
        return self.wait_for("code ")

    def type(self, text: str) -> None:
        os.write(self._write, text.encode())

    def end(self) -> str:
        """Wait until it is over; the error's text, or the name of who was paired."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        for descriptor in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        return str(self.error) if self.error else self.paired.peer.name


def pair_up(listener: Wish, joiner: Wish, answers=("yes\n", "yes\n")):
    """Both sides to their ends: ``(ends, sides)``, listener first."""
    one = Side.listen(listener)
    two = Side.join(joiner, one.address)
    assert one.code() == two.code()
    for side, answer in zip((one, two), answers, strict=True):
        side.type(answer)
    return (one.end(), two.end()), (one, two)


@dataclass
class Scripted:
    """An end that is driven by hand from the key agreement on."""

    sealed: SealedLine
    agreed: agree.Agreement
    joiner: bool

    @classmethod
    def join(cls, address: Address) -> Scripted:
        line, share = connect(address, Deadline(SECONDS)), Share.draw()
        first, third = agree.first_message(share), agree.third_message(share)
        line.send(first)
        second = line.receive(agree.SECOND_BYTES)
        line.send(third)
        agreed = agree.agree(share, first, second, third, joiner=True)
        boxes = Box(agreed.to_listener), Box(agreed.to_joiner)
        return cls(SealedLine(line, *boxes), agreed, True)

    @classmethod
    def accept(cls, server) -> Scripted:
        line, share = accept_one(server, Deadline(SECONDS)), Share.draw()
        first, second = line.receive(agree.FIRST_BYTES), agree.second_message(share)
        line.send(second)
        third = line.receive(agree.THIRD_BYTES)
        agreed = agree.agree(share, first, second, third, joiner=False)
        boxes = Box(agreed.to_joiner), Box(agreed.to_listener)
        return cls(SealedLine(line, *boxes), agreed, False)

    def offers(self, wish: Wish):
        """Give the offer of ``wish`` and take the other one: ``(party, offer)``."""
        party = prepare(wish)
        mine = encode_offer(party.offer(self.agreed, joiner=self.joiner))
        if self.joiner:
            self.sealed.send(mine)
        theirs = decode_offer(self.sealed.receive())
        if not self.joiner:
            self.sealed.send(mine)
        return party, theirs

    def hang_up(self) -> None:
        self.sealed.line.__exit__(None, None, None)


def open_port():
    """``(server, address)`` of a scripted listener."""
    server = listen(Address(HOST, 0))
    return server, Address(HOST, server.getsockname()[1])


class Terminal:
    """``kvnode pair`` in a process of its own."""

    def __init__(self, *arguments) -> None:
        command = [sys.executable, "-m", "node", "pair", *[str(a) for a in arguments]]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def wait_for(self, start: str) -> str:
        for line in self.process.stderr:
            if line.startswith(start):
                return line.removeprefix(start).strip()
        raise AssertionError(f"never said {start!r}")

    def end(self, answer: str) -> tuple[int, str, str]:
        """Type, and wait: exit code, standard output, the rest of standard error."""
        out, err = self.process.communicate(answer, timeout=SECONDS)
        return self.process.returncode, out, err


def as_node(folder: Path, name: str | None, **more) -> Wish:
    """A wish with the usual values."""
    return Wish(folder, name, more.pop("role", Role.NODE), **more)
