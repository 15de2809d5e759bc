"""Random histories of a directory against a few lines of plain Python that say what must hold."""

from __future__ import annotations

import asyncio
import random

import pytest
from directory_memory import MemoryDirectory, now
from directory_support import FakeClock, nonce

from node import directory_tables
from node.directory import Ownership, Released
from node.directory_sqlite import SqliteDirectory
from node.errors import LeaseLiveError, LeaseLostError, SessionExistsError, StaleTokenError

NODES = ("a", "b", "c")
SESSIONS = ("s", "t", "u")
TTL_S = 10.0

#: What may happen, as often as it stands here.
KINDS = (
    *("claim", "claim", "transfer", "transfer", "transfer", "takeover", "takeover", "release"),
    *("put", "renew", "renew", "register", "sleep", "sleep", "reboot", "adopt"),
)


class Expected:
    """What a directory must know: owners, tombstones, values, when each node was last heard of."""

    def __init__(self):
        self.owned = {}  # session -> (node, token)
        self.released = {}  # session -> token
        self.values = {}
        self.heard_s = {}  # node -> true time of its last renewal
        self.holder = {}  # node -> incarnation
        self.revisions = [0]
        self.generation = 1
        self.true_s = 0.0

    def entered(self, session, node, token):
        assert token.revision > self.revisions[-1], "a revision was given out twice"
        assert token.generation == self.generation
        self.revisions.append(token.revision)
        self.owned[session] = (node, token)
        self.released.pop(session, None)


class History:
    """Random operations by several nodes, some with tokens that are not current any more."""

    def __init__(self, seed, directory, clock, call=now):
        self.random = random.Random(seed)
        self.directory = directory
        self.clock = clock
        self.call = call
        self.expected = Expected()
        self.tokens = []  # every token ever seen: (session, token)
        self.number = 0
        self.done = set()

    def step(self):
        kind = self.random.choice(KINDS)
        self.done.add(kind) if getattr(self, f"_{kind}")() else None
        self._check()

    def _nonce(self):
        self.number += 1
        return nonce(self.number)

    def _some(self):
        session = self.random.choice(SESSIONS)
        old = [token for of, token in self.tokens if of == session]
        current = self.expected.owned.get(session)
        if current is not None and (not old or self.random.random() < 0.6):
            return session, current[1]
        return (session, self.random.choice(old)) if old else (session, None)

    def _current(self, session, token):
        entry = self.expected.owned.get(session)
        return entry is not None and entry[1] == token

    def _claim(self):
        session, node = self.random.choice(SESSIONS), self.random.choice(NODES)
        free = session not in self.expected.owned
        try:
            token = self.call(self.directory.claim(session, node, self._nonce()))
        except SessionExistsError:
            assert not free
            return False
        assert free
        self.expected.values.pop(session, None)
        self._entered(session, node, token)
        return True

    def _transfer(self):
        session, token = self._some()
        if token is None:
            return False
        node, number = self.random.choice(NODES), self._nonce()
        good = self._current(session, token)
        try:
            new = self.call(self.directory.transfer(session, token, node, number))
        except StaleTokenError:
            assert not good
            return False
        assert good
        self._entered(session, node, new)
        # Sent again, as by one whose first reply was lost: done once.
        assert self.call(self.directory.transfer(session, token, node, number)) == new
        return True

    def _takeover(self):
        session, token = self._some()
        if token is None:
            return False
        node = self.random.choice(NODES)
        good = self._current(session, token)
        owner = self.expected.owned[session][0] if good else None
        try:
            new = self.call(self.directory.takeover(session, token, node, self._nonce()))
        except (StaleTokenError, LeaseLiveError) as error:
            assert not good or isinstance(error, LeaseLiveError)
            return False
        assert good
        heard_s = self.expected.heard_s.get(owner, float("-inf"))
        # By true time, whatever the machine's clock was made to begin at.
        assert owner == node or self.expected.true_s - heard_s >= TTL_S - 0.002
        self._entered(session, node, new)
        return owner != node

    def _release(self):
        session, token = self._some()
        if token is None:
            return False
        again = self.expected.released.get(session) == token
        try:
            self.call(self.directory.release(session, token))
        except StaleTokenError:
            assert not self._current(session, token) and not again
            return False
        assert self._current(session, token) or again
        if not again:
            del self.expected.owned[session]
            self.expected.released[session] = token
            self.expected.values.pop(session, None)
            self.expected.revisions.append(self.call(self.directory.state()).revision)
        return True

    def _put(self):
        session, token = self._some()
        if token is None:
            return False
        try:
            self.call(self.directory.put(session, token, value := self._nonce()))
        except StaleTokenError:
            assert not self._current(session, token)
            return False
        assert self._current(session, token)
        self.expected.values[session] = (token, value)
        return True

    def _renew(self):
        node = self.random.choice(NODES)
        incarnation = self.random.choice([nonce(1), nonce(2)])
        holder = self.expected.holder.get(node)
        try:
            self.call(self.directory.renew(node, incarnation, TTL_S))
        except LeaseLostError:
            assert holder not in (None, incarnation)
            return False
        assert holder in (None, incarnation)
        return self._heard(node, incarnation)

    def _register(self):
        node, incarnation = self.random.choice(NODES), self.random.choice([nonce(1), nonce(2)])
        self.call(self.directory.register(node, incarnation, TTL_S))
        return self._heard(node, incarnation)

    def _heard(self, node, incarnation):
        self.expected.heard_s[node] = self.expected.true_s
        self.expected.holder[node] = incarnation
        return True

    def _sleep(self):
        seconds = self.random.choice([0.1, 1.0, 4.0, 9.9, 10.1])
        self.expected.true_s += seconds
        self.clock.move(seconds)
        return True

    def _reboot(self):
        if self.random.random() < 0.7:
            return False
        # The machine was off for a while, and has been up for less than that.
        off_s, up_s = self.random.choice([0.0, 2.0, 50.0]), self.random.choice([0.0, 1.0, 12.0])
        self.expected.true_s += off_s + up_s
        self.clock.restart(up_s)
        return True

    def _adopt(self):
        if self.random.random() < 0.7:
            return False
        state = self.call(self.directory.adopt())
        self.expected.generation += 1
        assert state.generation == self.expected.generation
        self.expected.revisions.append(state.revision)
        for session in list(self.expected.owned):
            node, _ = self.expected.owned[session]
            record = self.call(self.directory.owner(session))
            self.expected.owned[session] = (node, record.token)
        return True

    def _entered(self, session, node, token):
        self.expected.entered(session, node, token)
        self.tokens.append((session, token))

    def _check(self):
        for session in SESSIONS:
            record = self.call(self.directory.owner(session))
            if session in self.expected.owned:
                node, token = self.expected.owned[session]
                assert isinstance(record, Ownership)
                assert (record.node, record.token) == (node, token)
            elif session in self.expected.released:
                assert isinstance(record, Released)
                assert record.token == self.expected.released[session]
            else:
                assert record is None
            published = self.call(self.directory.published(session))
            expected = self.expected.values.get(session)
            assert (published and (published.token, published.value)) == expected


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_hold_what_a_few_lines_say(seed):
    clock = FakeClock()
    directory = MemoryDirectory(clock)
    history = History(seed, directory, clock)
    for _ in range(400):
        history.step()
    assert history.done >= {"claim", "transfer", "takeover", "release", "put", "renew", "adopt"}


@pytest.mark.parametrize("planted", ["floor", "nonce", "lease"])
def test_the_histories_find_a_planted_fault(planted, monkeypatch):
    if planted == "floor":
        monkeypatch.setattr(directory_tables, "TOMBSTONE_SPAN", 1)
    elif planted == "nonce":
        real = directory_tables.transfer
        monkeypatch.setattr(
            directory_tables,
            "transfer",
            lambda c, session, token, node, _: real(c, session, token, node, b"0" * 16),
        )
    else:
        over = directory_tables.NodeLease("any", b"", 0.0)
        monkeypatch.setattr(directory_tables, "read_lease", lambda *_: over)
    with pytest.raises((AssertionError, StaleTokenError)):
        for seed in range(12):
            clock = FakeClock()
            history = History(seed, MemoryDirectory(clock), clock)
            for _ in range(400):
                history.step()


def test_a_random_history_survives_restarts_of_the_file(tmp_path):
    clock = FakeClock()
    loop = asyncio.new_event_loop()
    directory = SqliteDirectory(tmp_path / "directory.sqlite", clock)
    history = History(77, directory, clock, loop.run_until_complete)
    for number in range(120):
        history.step()
        if number % 15 == 14:
            loop.run_until_complete(history.directory.close())
            history.directory = SqliteDirectory(tmp_path / "directory.sqlite", clock)
    loop.run_until_complete(history.directory.close())
    loop.close()
    assert {"claim", "transfer", "release"} <= history.done
