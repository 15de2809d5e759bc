"""One seeded run: nodes, a client, moves, faults for a while, then peace; what must be so then.

The client generates greedily, so what it should get is known: the tokens and logits of a twin
that never moved (``Twin``). An index that was acknowledged may be lost only by a crash of the
owner, and only down to the last published cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from pathlib import Path

from kvpack.errors import KvpackError
from model.sim_loop import CURRENT, Dead, VirtualLoop, patched, spawn
from model.sim_node import ADDRESS, SimEngine, SimNode
from node.binding import PackBinding
from node.directory import Ownership
from node.directory_sqlite import SqliteDirectory
from node.errors import SessionStateError
from node.migration.source import Order
from node.session import Session

NODES = ("a", "b", "c")
SESSION = "s"

#: Chances of each fault, by the place where it is drawn.
CHANCES = {
    "crash": 0.006, "lost": 0.05, "late": 0.04, "double": 0.05, "unanswered": 0.05, "cut": 0.02,
    "away": 0.03, "reply": 0.05, "full": 0.03, "late write": 0.04, "journal": 0.03,
}  # fmt: skip

#: Faults stop after so long, in virtual seconds; then leases and patience may run out.
FAULTS_S, PEACE_S = 40.0, 400.0

#: So often, in virtual seconds, it is looked whether anything is still under way.
LOOK_S = 2.0

#: Tokens given first: below, at and beyond the window of 16.
PROMPTS = (3, 15, 16, 17, 33, 70)


class Broken(Exception):
    """A run that broke a promise."""


class Twin:
    """What a session of each prompt gives that never moves."""

    def __init__(self, model) -> None:
        self._model = model
        self._sessions: dict[int, tuple[Session, dict[int, tuple[int, bytes]]]] = {}

    def prompt(self, length: int) -> list[int]:
        return [(31 + 7 * i + i * i) % 251 for i in range(length)]

    def token(self, length: int, index: int) -> tuple[int, bytes]:
        """The token at ``index``, and the digest of the logits it was chosen from."""
        session, known = self._sessions.get(length) or self._begin(length)
        while index not in known:
            decoded = session.decode_next()
            known[decoded.index] = (decoded.token_id, decoded.logits.digest())
        return known[index]

    def _begin(self, length: int):
        model = self._model
        session = Session("twin", None, model.new_generation(), vocab_size=model.vocab_size)
        session.extend(self.prompt(length))
        for call_tokens in session.backlog_calls():
            session.prefill_next(call_tokens)
        self._sessions[length] = (session, {})
        return self._sessions[length]


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a run came to."""

    owner: str
    moves: int
    moved: int
    crashes: int
    faults: int
    lost: bool


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
        self._settled: asyncio.Task | None = None

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
        if self._owner_now() == node.name:
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

    def _owner_now(self) -> str:
        row = self.directory._database._connection.execute(
            "SELECT node FROM ownership WHERE session_id = ?", (SESSION,)
        ).fetchone()
        return row[0] if row else ""

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
        owner = self._owner_now()
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
        ended = await self._check(clients)
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
        node = self.nodes.get(self._owner_now())
        return node if node is not None and node.up else None

    async def _client(self) -> None:
        """Ask for one token after the other, wherever the session is."""
        while self._faulty:
            await asyncio.sleep(self.random.uniform(0.05, 4.0))
            node = self._serving()
            if node is not None and SESSION in node.sessions and self.must:
                with contextlib.suppress(KvpackError):
                    await self._ask(node, 1)

    async def _ask(self, node: SimNode, count: int) -> None:
        """Generate from what must be known on; every answer is compared with the twin's."""
        session = await self._within(node, node.sessions.find(SESSION))
        first = self.must or self.length
        answers, process = (
            node.sessions.generate(SESSION, session.token, first, count),
            node.process,
        )
        index = first
        while (answer := await self._within(node, anext(answers, None))) is not None:
            if process is None or not process.alive:
                return  # It crashed with the answer on its way.
            _, decoded = answer
            expected = self.twin.token(self.length, index)
            digest = None if decoded.logits is None else decoded.logits.digest()
            if decoded.token_id != expected[0] or digest not in (None, expected[1]):
                self.broken.append(f"{node.name}: wrong bits at {index}")
            index += 1
            self.must = max(self.must, index)

    async def _within(self, node: SimNode, work):
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
                await self._within(node, self._move(node, order))
                self.moved += 1
                if copy_as:
                    self.copies[copy_as] = target

    async def _move(self, node: SimNode, order: Order) -> None:
        session = await node.sessions.find(SESSION)
        async for _ in node.moves.start(SESSION, session.token, (), order):
            pass

    async def _check(self, clients) -> Ended:
        if any(not client.done() for client in clients):
            self.broken.append("a client or a move has not ended")
        owner = self._owner_now()
        holders = [n.name for n in self.nodes.values() if n.up and SESSION in n.sessions]
        lost = False
        if holders == [owner]:
            try:
                await self._ask(self.nodes[owner], 3)
            except KvpackError as error:
                self.broken.append(f"the owner {owner} does not serve: {error}")
        elif not holders and self.must == 0:
            lost = True  # never published: the stated loss bound
        else:
            self.broken.append(f"owner {owner}, held by {holders}, {self.must} tokens promised")
        for copy_id, target in self.copies.items():
            await self._check_copy(copy_id, target)
        await self._check_leftovers(owner)
        if self.broken:
            raise Broken(f"seed {self.seed}: {'; '.join(self.broken)}; faults: {self.faults}")
        return Ended(owner, self.moves, self.moved, self.crashes, len(self.faults), lost)

    async def _check_copy(self, copy_id: str, target: str) -> None:
        """A copy that was reported is there; one that was not is there whole, or not claimed."""
        entry = await self.directory.owner(copy_id)
        if not isinstance(entry, Ownership):
            if target:
                self.broken.append(f"{copy_id} was reported, and nobody owns it")
            return
        node = self.nodes[entry.node]
        if copy_id not in node.sessions:
            await self._check_claim(node, copy_id, target)
            return
        session = await self._within(node, node.sessions.find(copy_id))
        known, first = list(session.token_ids), self.length
        expected = [self.twin.token(first, index)[0] for index in range(first, len(known))]
        decoded = session.decode_next()
        bits = self.twin.token(first, decoded.index)
        if known != self.twin.prompt(first) + expected or bits[1] != decoded.logits.digest():
            self.broken.append(f"{copy_id}: wrong bits")

    async def _check_claim(self, node: SimNode, copy_id: str, target: str) -> None:
        """A claim that no directory took back is a name without a session: it can be opened."""
        if target or not {"away", "reply", "late write"} & {
            fault.split(":")[0] for fault in self.faults
        }:
            self.broken.append(f"{copy_id} is claimed by {node.name}, which does not have it")
            return
        node.stop()
        await node.start()
        try:
            await self._within(node, node.sessions.open(copy_id))
        except KvpackError as error:
            self.broken.append(
                f"{copy_id} is claimed by {node.name}, and cannot be opened: {error}"
            )

    async def _check_leftovers(self, owner: str) -> None:
        for node in self.nodes.values():
            if not node.up:
                self.broken.append(f"{node.name} is not up in the end")
                continue
            if node.transfers.open_offers():
                self.broken.append(f"{node.name} has an open transfer in the end")
            known = {session.spool.name for session in node.sessions.page("", 9)[0]
                     if session.spool is not None}  # fmt: skip
            if left := {path.name for path in node.spool.iterdir()} - known:
                self.broken.append(f"{node.name} has left over {sorted(left)}")
        entry = await self.directory.owner(SESSION)
        if not isinstance(entry, Ownership):
            self.broken.append("nobody owns the session in the end")


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
