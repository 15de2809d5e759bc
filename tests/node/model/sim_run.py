"""One seeded run: nodes, a client, moves, faults for a while, then peace; what must be so then.

The client generates greedily, so what it should get is known: the tokens and logits of a twin
that never moved (``Twin``). An index that was acknowledged may be lost only by a crash of the
owner, and only down to the last published cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

from kvpack.errors import KvpackError
from model.sim_ends import Ended, check
from model.sim_loop import CURRENT, Dead, VirtualLoop, patched, spawn
from model.sim_node import ADDRESS, SESSION, SimEngine, SimNode
from model.sim_twin import Twin
from node.binding import PackBinding
from node.directory_sqlite import SqliteDirectory
from node.errors import SessionStateError
from node.migration.orders import Order
from node.session import Session

NODES = ("a", "b", "c")

#: Chances of each fault, by the place where it is drawn.
CHANCES = {
    "crash": 0.006, "lost": 0.05, "late": 0.04, "double": 0.05, "unanswered": 0.05, "cut": 0.02,
    "away": 0.03, "reply": 0.05, "full": 0.03, "late write": 0.04, "journal": 0.03,
    "vanish": 0.003,
}  # fmt: skip

#: Faults stop after so long, in virtual seconds; then leases and patience may run out.
FAULTS_S, PEACE_S = 40.0, 400.0

#: So often, in virtual seconds, it is looked whether anything is still under way.
LOOK_S = 2.0

#: Tokens given first: below, at and beyond the window of 16.
PROMPTS = (3, 15, 16, 17, 33, 70)


class Sim:
    """One run. Also the clock of its leases."""

    def __init__(self, seed: int, folder: Path, model, key, twin: Twin, chances=None) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.folder = folder
        self.engine = SimEngine(model)
        self.binding = PackBinding.of(model, key)
        self.twin = twin
        self.length = self.random.choice(PROMPTS)
        # Quiet runs and wild ones: not every run has every fault.
        wild = self.random.choice((0.5, 1.0, 3.0))
        self._chances = {name: wild * p for name, p in (chances or CHANCES).items()}
        self._faulty = True
        self.faults: list[str] = []
        self.must = self.known = self.published = 0
        self.broken: list[str] = []
        self.copies: dict[str, str] = {}
        self.moves = self.moved = self.crashes = 0
        self._background: set[asyncio.Task] = set()
        self._hidden: tuple | None = None

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # --- Faults ---------------------------------------------------------------------------

    def chance(self, name: str) -> bool:
        """Whether the fault ``name`` happens here."""
        happens = self._faulty and self.random.random() < self._chances.get(name, 0.0)
        if happens:
            process = CURRENT.get()
            self.faults.append(f"{name}: {process.name if process else '-'}")
        return happens

    async def pause(self) -> None:
        """Let others come first, at times for long: messages and tasks overtake each other."""
        delay_s = self.random.choice((0.0, 0.0, 0.0, 0.01, 0.1, 1.5))
        await asyncio.sleep(delay_s if self._faulty else 0.0)

    async def step(self) -> None:
        """A moment at which this process may be paused or crash."""
        await self.pause()
        self.reach("step")

    def reach(self, point: str) -> None:
        """A point of the product's own: this process may crash here, and does nothing after it."""
        process = CURRENT.get()
        if process is None:
            return
        process.check()
        if self.chance("crash"):
            self.faults[-1] += f", {point}"
            self.crash(self.nodes[process.name])
            raise Dead(point)

    def crash(self, node: SimNode) -> None:
        """End a node's process now; it is started again after a while."""
        self.crashes += 1
        if self.owner_now() == node.name:
            self.must = min(self.must, self.published)
        node.stop()
        self.background(self._restart(node))

    async def _restart(self, node: SimNode) -> None:
        await asyncio.sleep(self.random.uniform(0.1, 10.0))
        await node.start()

    def background(self, work) -> None:
        token = CURRENT.set(None)
        task = asyncio.get_running_loop().create_task(work)
        CURRENT.reset(token)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def write_later(self, call, args) -> None:
        async def later() -> None:
            await asyncio.sleep(self.random.uniform(0.1, 8.0))
            with contextlib.suppress(KvpackError):
                answer = await call(*args)
                self.saw(call.__name__, args, answer)

        self.background(later())

    # --- What is watched from outside -----------------------------------------------------

    def _entry(self) -> tuple | None:
        connection = self.directory._database._connection
        row = connection.execute("SELECT * FROM ownership WHERE session_id = ?", (SESSION,))
        return row.fetchone()

    def owner_now(self) -> str:
        row = self._hidden or self._entry()
        return row[1] if row else ""

    def vanish(self) -> None:
        """The directory loses the session's entry for a while."""
        row = self._hidden or self._entry()
        if self._hidden is None and row is not None:
            self._hidden = row
            self._write("DELETE FROM ownership WHERE session_id = ?", (SESSION,))
            self.background(self._find_again())

    async def _find_again(self) -> None:
        await asyncio.sleep(self.random.uniform(0.1, 20.0))
        row, self._hidden = self._hidden, None
        self._write("INSERT INTO ownership VALUES (?, ?, ?, ?)", row)

    def _write(self, statement: str, values: tuple) -> None:
        self.directory._database.run(lambda connection: connection.execute(statement, values))

    def saw(self, name: str, args, answer) -> None:
        """A write of the directory happened: a commit publishes the cut."""
        if name != "transfer" or args[0] != SESSION:
            return
        node = self.nodes[args[2]]
        if node.process is None or node.service is None:
            return
        for one in node.transfers._inbound.values():
            if one.offer.nonce == args[3] and one._session is not None:
                self.published = one._session.next_index - 1

    async def dropping(self, name: str, session: Session) -> None:
        """A node drops the session: another one owns it by then, and has it on disk."""
        owner = self.owner_now()
        if session.session_id == SESSION and session.phase.value == "frozen":
            if owner == name:
                self.broken.append(f"{name} released what it owns")
            elif not list(self.nodes[owner].spool.glob("*.kvpack")):
                self.broken.append(f"{name} released, but {owner} has nothing durable")

    # --- The run --------------------------------------------------------------------------

    async def run(self) -> Ended:
        self.directory = SqliteDirectory(self.folder / "directory.sqlite")
        self.nodes = {name: SimNode(self, name) for name in NODES}
        faulty, self._faulty = self._faulty, False
        for node in self.nodes.values():
            await node.start()
        sessions = self.nodes["a"].sessions
        session = await sessions.open(SESSION)
        await sessions.append(session, self.twin.prompt(self.length))
        self.must = self.length
        self._faulty = faulty
        clients = [asyncio.create_task(self._client())]
        clients += [asyncio.create_task(self._mover()) for _ in range(2)]
        await asyncio.sleep(FAULTS_S)
        self._faulty = False
        await self._quiet(clients)
        ended = await check(self, clients)
        for node in self.nodes.values():
            node.stop()
        await self.directory.close()
        return ended

    async def _quiet(self, clients) -> None:
        """Wait until nothing is under way any more, for as long as anything may take."""
        patience_s = self.now_s() + PEACE_S
        while self.now_s() < patience_s:
            await asyncio.sleep(LOOK_S)
            nodes = self.nodes.values()
            busy = self._background or any(not client.done() for client in clients)
            if not busy and all(n.up and not n.transfers.open_offers() for n in nodes):
                await asyncio.sleep(LOOK_S)  # what has ended may be about to clean up
                return

    def _serving(self) -> SimNode | None:
        node = self.nodes.get(self.owner_now())
        return node if node is not None and node.up else None

    async def _client(self) -> None:
        """Ask for one token after the other, wherever the session is."""
        while self._faulty:
            await asyncio.sleep(self.random.uniform(0.05, 4.0))
            node = self._serving()
            if node is not None and SESSION in node.sessions and self.must:
                with contextlib.suppress(KvpackError):
                    await self.ask(node, 1)

    async def ask(self, node: SimNode, count: int) -> None:
        """Generate from what must be known on; every answer is compared with the twin's."""
        session = await self.within(node, node.sessions.find(SESSION))
        first = self.must or self.length
        answers, process = (
            node.sessions.generate(SESSION, session.token, first, count),
            node.process,
        )
        index = first
        while (answer := await self.within(node, anext(answers, None))) is not None:
            if process is None or not process.alive:
                return  # It crashed with the answer on its way.
            _, decoded = answer
            expected = self.twin.token(self.length, index)
            digest = None if decoded.logits is None else decoded.logits.digest()
            if decoded.token_id != expected[0] or digest not in (None, expected[1]):
                self.broken.append(f"{node.name}: wrong bits at {index}")
            index += 1
            self.must = max(self.must, index)

    async def within(self, node: SimNode, work):
        """``work`` as a call into that node: where it crashes, the caller sees a broken link."""

        async def guarded():
            return await work

        task = spawn(node.process, guarded())
        await asyncio.wait({task})
        if task.cancelled():
            raise SessionStateError("the node crashed")
        return task.result()

    async def _mover(self) -> None:
        """Order one move or copy after the other, from wherever the session is."""
        for _ in range(self.random.randint(1, 3)):
            await asyncio.sleep(self.random.uniform(0.0, 12.0))
            node = self._serving()
            if node is None or SESSION not in node.sessions:
                continue
            target = self.random.choice([name for name in NODES if name != node.name])
            copy_as = f"copy-{len(self.copies)}" if self.random.random() < 0.25 else ""
            if copy_as:
                self.copies[copy_as] = ""
            self.moves += 1
            with contextlib.suppress(KvpackError):
                order = Order(target, ADDRESS, copy_as=copy_as)
                await self.within(node, self._move(node, order))
                self.moved += 1
                if copy_as:
                    self.copies[copy_as] = target

    async def _move(self, node: SimNode, order: Order) -> None:
        session = await node.sessions.find(SESSION)
        async for _ in node.moves.start(SESSION, session.token, (), order):
            pass

    def holders(self) -> list[str]:
        return [node.name for node in self.nodes.values() if node.up and SESSION in node.sessions]


def run_seed(seed: int, folder: Path, model, key, twin: Twin, chances=None) -> Ended:
    """One run in an empty folder.

    Raises:
        Broken: It broke a promise; the message names the seed and every fault of the run.
    """
    loop = VirtualLoop()
    sim = Sim(seed, folder, model, key, twin, chances)
    with patched(loop, sim.reach):
        try:
            return loop.run_until_complete(sim.run())
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
