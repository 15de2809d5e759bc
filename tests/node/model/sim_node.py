"""One simulated node: the product's parts, wired as the server wires them, and its crashes."""

from __future__ import annotations

import asyncio
import dataclasses

from kvpack.errors import PublishError
from model.sim_link import Gate, Link
from model.sim_loop import Process, check_alive, spawn
from node.config import Address
from node.errors import DirectoryAmbiguousError, DirectoryError, JournalError
from node.lease import NodeLease
from node.migration.admission import Target
from node.migration.journal import Journal
from node.migration.moves import Moves
from node.migration.orders import Source
from node.migration.spool import Spool
from node.migration.target import Transfers
from node.migration_service import MigrationService, _answering
from node.pace import Pace
from node.pb.v1 import migration_pb2 as pb
from node.recover import recover
from node.sessions import Sessions

#: The session that is moved about.
SESSION = "s"

WRITES = frozenset({"claim", "transfer", "release"})


class SimEngine:
    """The engine without its thread."""

    def __init__(self, model) -> None:
        self.model = model
        self.pace = Pace()

    async def call(self, work, *args, **kwargs):
        await asyncio.sleep(0)
        check_alive()
        return work(*args, **kwargs)


class SimDirectory:
    """What one process sees of the directory: away at times, its replies lost, its writes late."""

    def __init__(self, sim) -> None:
        self._sim = sim

    def __getattr__(self, name):
        call = getattr(self._sim.directory, name)

        async def asked(*args, **kwargs):
            sim = self._sim
            await sim.step()
            if sim.chance("vanish"):
                sim.vanish()
            if sim.chance("away"):
                raise DirectoryError("simulated: the directory is away")
            if name in WRITES and sim.chance("late write"):
                sim.write_later(call, args)
                raise DirectoryAmbiguousError("simulated: the write is still under way")
            answer = await call(*args, **kwargs)
            sim.saw(name, args, answer)
            if name in WRITES and sim.chance("reply"):
                raise DirectoryAmbiguousError("simulated: the reply was lost")
            await sim.step()
            return answer

        return asked


class SimJournal:
    """A journal whose process may crash before or after a write, and whose disk may refuse."""

    def __init__(self, sim, journal: Journal) -> None:
        self._sim = sim
        self._journal = journal

    def __getattr__(self, name):
        call = getattr(self._journal, name)

        async def asked(*args, **kwargs):
            await self._sim.step()
            if name in ("record", "reserve") and self._sim.chance("journal"):
                raise JournalError("simulated: the disk refuses")
            answer = await call(*args, **kwargs)
            await self._sim.step()
            return answer

        return asked


class SimSpool(Spool):
    """A spool that a dead process does not touch any more."""

    def add(self, chunk) -> None:
        check_alive()
        super().add(chunk)

    def drop(self) -> None:
        check_alive()
        super().drop()

    def suspend(self) -> None:
        check_alive()
        super().suspend()


@dataclasses.dataclass(frozen=True, slots=True)
class SimTarget(Target):
    """A target whose disk is full at times."""

    chance: object = None

    def new_pack(self, path, header_bytes):
        check_alive()
        if self.chance("full"):
            raise PublishError(f"{path.name}: simulated: no space left")
        return SimSpool(path, self.binding.key, header_bytes)


class SimSessions(Sessions):
    """Sessions that report what they drop to the run's invariants."""

    sim = None

    async def drop(self, session) -> None:
        await self.sim.dropping(self.node, session)
        await super().drop(session)


class SimNode:
    """A name and a disk; while it lives, a process with all its parts."""

    def __init__(self, sim, name: str) -> None:
        self.sim = sim
        self.name = name
        self.folder = sim.folder / name
        self.spool = self.folder / "spool"
        self.spool.mkdir(parents=True)
        self.process: Process | None = None
        self.service = None
        self.handlers = {}
        self._journal: Journal | None = None

    async def start(self) -> None:
        """Begin a process; it may crash while it recovers."""
        self.process = Process(self.name)
        starting = spawn(self.process, self._start())
        await asyncio.wait({starting})
        if not starting.cancelled():
            starting.result()

    async def _start(self) -> None:
        sim, folder = self.sim, self.folder
        self._journal = Journal(folder / "journal.sqlite")
        directory, journal = SimDirectory(sim), SimJournal(sim, self._journal)
        lease = NodeLease(sim.directory, self.name, sim, 600.0)
        await lease.start()
        spawn(self.process, lease.run())
        self.sessions = SimSessions(self.name, sim.engine, directory, journal, lease)
        self.sessions.sim = sim

        def connect(peer, address):
            return Link(sim, self.name, peer)

        source = Source(self.sessions, sim.engine, sim.binding, journal, connect)
        target = SimTarget(
            self.sessions, sim.engine, sim.binding, journal, self.spool, chance=sim.chance
        )
        self.transfers = Transfers(target)
        try:
            await recover(target, self.transfers)
        except (DirectoryError, JournalError):
            sim.crash(self)  # a node that cannot recover does not start; it is started again
            return
        self.moves = Moves(source)
        spawn(self.process, self.transfers.watch_leases())
        self.service = MigrationService(self.transfers, Gate())
        self.handlers = {
            name: (_answering(getattr(self.service, name.lower())), request.FromString)
            for name, request in (
                ("Prepare", pb.PrepareRequest),
                ("Seal", pb.SealRequest),
                ("Commit", pb.CommitRequest),
                ("Abort", pb.AbortRequest),
                ("Status", pb.StatusRequest),
            )
        }
        self.handlers["Push"] = (_answering(self.service.push), None)

    @property
    def up(self) -> bool:
        return self.service is not None

    def stop(self) -> None:
        """The process is gone. What it had on disk stays as it is."""
        process, self.process, self.service, self.handlers = self.process, None, None, {}
        if process is not None:
            process.alive = False
            for task in list(process.tasks):
                task.cancel()
        if self._journal is not None:
            self._journal._database.close()
            self._journal = None


#: Where every node listens: links go by names.
ADDRESS = Address("127.0.0.1", 1)
