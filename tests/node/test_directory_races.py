"""Every order of the steps of those who want one session: claimers, movers, owners that slept.

Each history runs on the production tables, the production lease and the production rule of who may
conclude what (:func:`node.directory.whose`).
"""

from __future__ import annotations

import contextlib

import pytest
from directory_memory import MemoryDirectory, interleavings, now
from directory_support import FakeClock, nonce

from kvpack.errors import KvpackError
from node import lease as lease_module
from node.directory import Ownership, Released, Whose, whose
from node.errors import (
    FencedError,
    LeaseLiveError,
    SessionExistsError,
    StaleTokenError,
)
from node.lease import NodeLease

TTL_S = 10.0


_DIRECTORY = MemoryDirectory(FakeClock())


class World:
    """One directory, one clock, and nodes by name: each has a lease and what it knows of "s"."""

    def __init__(self, *names):
        self.clock = FakeClock()
        self.directory = _DIRECTORY.empty(self.clock)
        self.leases = {name: NodeLease(self.directory, name, self.clock, TTL_S) for name in names}
        for lease in self.leases.values():
            now(lease.start())
        self.tokens = {}
        self.outputs = []

    def owner(self):
        return now(self.directory.owner("s"))

    def owns(self, name):
        record = self.owner()
        return (
            isinstance(record, Ownership)
            and record.node == name
            and record.token == self.tokens.get(name)
        )


def histories(actors, make):
    """Run every order of the actors' steps, each in a world of its own; gives how each ended."""
    for order in interleavings(*(length for length, _ in actors)):
        world = make()
        running = [actor(world) for _, actor in actors]
        for number in order:
            next(running[number], None)
        for one in running:
            for _ in one:
                pass
        yield order, world


# --- Two claimers. ---


def claimer(name, number):
    def steps(world):
        if world.owner() is None:
            yield
            try:
                world.tokens[name] = now(world.directory.claim("s", name, nonce(number)))
            except SessionExistsError:
                return
        yield
        if world.owns(name):
            world.outputs.append(name)

    return steps


def test_of_two_claimers_one_owns_and_only_that_one_serves():
    count = 0
    for order, world in histories([(3, claimer("a", 1)), (3, claimer("b", 2))], lambda: World()):
        count += 1
        assert len(world.tokens) == 1, order
        assert world.outputs == list(world.tokens), order
    assert count == 20


# --- A takeover against an owner that is paused, renews, resumes, serves. ---


def serving(name):
    """One operation, as ``Sessions.hold`` does it, stopped between any two of its steps."""

    def steps(world):
        lease = world.leases[name]
        try:
            mark = lease.require()
            record = world.owner()
            yield
            token = world.tokens[name]
            if whose(record, name, token) is not Whose.OURS or record.token != token:
                return
            lease.require(mark)
            yield
            # The computation; then, before its result is given out:
            lease.require(mark)
        except FencedError:
            return
        world.outputs.append((name, world.owns(name)))

    return steps


def renewing(name, times):
    def steps(world):
        for _ in range(times):
            now(world.leases[name]._ask())
            yield

    return steps


def slow_renewal(name):
    """A renewal that was sent, and is answered later: the directory counts from its arrival."""

    def steps(world):
        lease = world.leases[name]
        sent_s = world.clock.now_s()
        yield
        now(lease._renew())
        yield
        lease._granted(sent_s)

    return steps


def sleeping(*seconds):
    def steps(world):
        for one in seconds:
            world.clock.move(one)
            yield

    return steps


def taking_over(name, number):
    def steps(world):
        token = world.owner().token
        try:
            world.tokens[name] = now(world.directory.takeover("s", token, name, nonce(number)))
        except (LeaseLiveError, StaleTokenError):
            return
        yield

    return steps


def resuming(name, number):
    def steps(world):
        try:
            token = now(world.directory.transfer("s", world.tokens[name], name, nonce(number)))
        except StaleTokenError:
            return
        world.tokens[name] = token
        yield

    return steps


def owned_by_a():
    world = World("a", "b")
    world.tokens["a"] = now(world.directory.claim("s", "a", nonce(1)))
    return world


def stale_outputs(extra=(), *, one_is_enough=False):
    """Outputs that were given out although another node owned the session; and all of them."""
    stale, outputs, takeovers = [], 0, 0
    actors = [
        (3, serving("a")),
        (2, sleeping(TTL_S * 0.95, TTL_S * 0.06)),
        (1, taking_over("b", 2)),
        *extra,
    ]
    for order, world in histories(actors, owned_by_a):
        outputs += len(world.outputs)
        takeovers += "b" in world.tokens
        stale += [order for _, good in world.outputs if not good]
        if stale and one_is_enough:
            break
    return stale, outputs, takeovers


@pytest.mark.parametrize(
    "extra",
    [(), ((2, renewing("a", 2)),), ((3, slow_renewal("a")),), ((1, resuming("a", 9)),)],
    ids=["asleep", "renews", "renews late", "resumes"],
)
def test_nothing_is_given_out_after_the_session_was_taken_over(extra):
    stale, outputs, takeovers = stale_outputs(extra)
    assert stale == []
    assert outputs and takeovers


def test_the_exploration_finds_a_lease_that_is_measured_too_long(monkeypatch):
    monkeypatch.setattr(lease_module, "UNUSED", -0.2)
    assert stale_outputs(one_is_enough=True)[0]


def test_the_exploration_finds_a_lease_that_counts_from_the_answer(monkeypatch):
    granted = NodeLease._granted

    def late(lease, sent_s):
        granted(lease, lease._clock.now_s() + TTL_S * 0.1)

    monkeypatch.setattr(NodeLease, "_granted", late)
    assert stale_outputs(((3, slow_renewal("a")),), one_is_enough=True)[0]


def test_the_exploration_finds_an_operation_that_does_not_carry_its_mark(monkeypatch):
    require = NodeLease.require
    monkeypatch.setattr(NodeLease, "require", lambda lease, mark=None: require(lease))
    assert stale_outputs(((2, renewing("a", 2)),), one_is_enough=True)[0]


# --- A move, an owner that resumes, a release and an adoption, all from one token. ---


def moving(world_token, name, number):
    def steps(world):
        token = world.tokens[world_token]
        yield
        try:
            world.tokens[name] = now(world.directory.transfer("s", token, name, nonce(number)))
            world.won.append(name)
        except StaleTokenError:
            return

    return steps


def adopting(world):
    before = world.owner().token if isinstance(world.owner(), Ownership) else None
    now(world.directory.adopt())
    after = world.owner()
    if isinstance(after, Ownership):
        assert after.token.newer_than(before)
    yield


def releasing(name):
    def steps(world):
        token = world.tokens[name]
        yield
        try:
            now(world.directory.release("s", token))
            world.won.append("released")
        except StaleTokenError:
            return

    return steps


def one_of_three():
    world = World("a", "b")
    world.tokens["a"] = now(world.directory.claim("s", "a", nonce(1)))
    world.won = []
    return world


def test_of_a_move_a_resume_and_a_release_from_one_token_one_happens_or_an_adoption_stops_all():
    actors = [
        (2, moving("a", "b", 2)),
        (2, moving("a", "a2", 3)),
        (2, releasing("a")),
        (1, adopting),
    ]
    ends = set()
    for order, world in histories(actors, one_of_three):
        assert len(world.won) <= 1, order
        record = world.owner()
        if world.won == ["released"]:
            assert isinstance(record, Released), order
        elif world.won:
            assert record.node == world.won[0], order
        else:
            # The adoption came before all three: their token was stale everywhere.
            assert record.node == "a" and record.token.generation == 2, order
        ends.add(tuple(world.won))
    assert ends == {(), ("b",), ("a2",), ("released",)}


def watching(name, token_of):
    """A frozen source: what does it conclude, at every moment of a history?"""

    def steps(world):
        token = world.tokens[token_of]
        for _ in range(2):
            yield
            record = world.owner()
            verdict = whose(record, name, token)
            if verdict is Whose.OTHERS:
                # It drops its rows for good: that must be true, and stay true of that token.
                with pytest.raises(KvpackError):
                    now(world.directory.transfer("s", token, name, nonce(99)))
                assert not (isinstance(record, Ownership) and record.node == name)
                world.dropped = True

    return steps


def test_a_frozen_source_drops_its_rows_only_on_proof_whatever_happens_around_it():
    def closing(world):
        yield
        if "b" in world.tokens:
            now(world.directory.release("s", world.tokens["b"]))
        yield
        if "b" in world.tokens:
            with contextlib.suppress(SessionExistsError):
                world.tokens["c"] = now(world.directory.claim("s", "c", nonce(7)))

    def losing(world):
        world.directory._connection.execute("DELETE FROM ownership")
        yield

    def make():
        world = one_of_three()
        world.dropped = False
        return world

    dropped = kept = 0
    actors = [(2, moving("a", "b", 2)), (3, watching("a", "a")), (3, closing)]
    for order, world in histories(actors, make):
        dropped += world.dropped
        assert world.dropped <= bool(world.won), order
    assert dropped
    # The same where the directory loses its entries: no verdict comes of that alone.
    for order, world in histories([(3, watching("a", "a")), (1, losing)], make):
        kept += 1
        assert not world.dropped, order
    assert kept
