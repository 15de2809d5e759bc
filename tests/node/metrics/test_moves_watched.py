"""Real moves between two nodes, as both ends see and count them."""

from __future__ import annotations

import contextlib
import dataclasses

from node_support import move, prompt, run

from node.errors import PeerAnswerError
from node.metrics.moves import MoveLog, Speed
from node.metrics.recorder import Recorder
from node.metrics.views import Direction, MoveView


def watch(node):
    """A log of all moves of ``node``, told of them from now on."""
    log = MoveLog(Recorder(), node.transfers.under_way, node.sessions.engine.model.layout)
    node.moves.watch = node.transfers.watch = log
    return log


def test_a_move_is_seen_by_both_ends_and_counted_once(world):
    async def go():
        async with world.pair() as (source, giving, target, _):
            out, into = watch(source), watch(target)
            seen: list[MoveView] = []
            told = out.progressed

            def looking(number, progress):
                told(number, progress)
                seen.extend((*out.views(), *into.views()))

            out.progressed = looking
            session = await giving.open("talk")
            result = await move(giving, target, session, prompt(70))
            assert result is not None
            return out, into, seen

    out, into, seen = run(go())
    giving = [one for one in seen if one.direction is Direction.OUT]
    taking = [one for one in seen if one.direction is Direction.IN]
    assert {(one.session_id, one.peer, one.copy) for one in giving} == {("talk", "target", False)}
    assert {(one.session_id, one.peer, one.copy) for one in taking} == {("talk", "source", False)}
    assert {"preparing", "streaming", "sealing"} <= {one.step for one in giving}
    done = [one.done_bytes for one in giving]
    assert done == sorted(done)
    assert giving[-1].total_bytes > 0
    assert out.views() == into.views() == ()
    (given,), (taken,) = out._recorder.last_moves, into._recorder.last_moves
    assert (given.reason, taken.reason) == ("", "")
    assert given.pause_s is not None and taken.pause_s is None
    assert given.payload_bytes == out._recorder.payload_bytes["out"] > 0
    assert taken.payload_bytes >= given.payload_bytes
    assert out._recorder.moves["out", "move", "done"] == 1
    assert into._recorder.moves["in", "move", "done"] == 1
    phases = {name: one.count for name, one in out._recorder.phases.items()}
    assert set(phases) == {
        "stream", "tail", "seal", "commit", "probe", "durable", "transfer", "swap", "pause",
    }  # fmt: skip
    assert set(phases.values()) == {1}


def test_a_copy_pauses_nobody(world):
    async def go():
        async with world.pair() as (source, giving, target, _):
            out = watch(source)
            session = await giving.open("talk")
            await move(giving, target, session, prompt(70), copy_as="talk-2")
            return out._recorder

    recorder = run(go())
    assert recorder.moves["out", "copy", "done"] == 1
    assert recorder.phases["pause"].count == 0
    assert recorder.last_moves[0].pause_s is None


def test_a_move_that_fails_says_why(world):
    async def go():
        async with world.pair() as (source, giving, target, _):
            out = watch(source)
            session = await giving.open("talk")
            nowhere = dataclasses.replace(
                target, address=dataclasses.replace(target.address, port=1)
            )
            with contextlib.suppress(PeerAnswerError):
                await move(giving, nowhere, session, prompt(70))
            return out

    out = run(go())
    (ended,) = out._recorder.last_moves
    assert ended.reason == "peer_unavailable"
    assert out._recorder.moves["out", "move", "peer_unavailable"] == 1
    assert out.views() == ()


def test_speed_is_that_of_the_last_seconds():
    speed = Speed()
    assert speed.look(0.0, 0) == 0.0
    assert speed.look(1.0, 100) == 100.0
    assert speed.look(2.0, 300) == 150.0
    for second in range(3, 12):
        last = speed.look(float(second), 300)
    assert last == 0.0


def test_time_left_is_not_guessed():
    sizes = {"done_bytes": 250, "total_bytes": 1000}
    view = MoveView("s", Direction.OUT, "p", False, "streaming", **sizes, bytes_per_s=150.0)
    assert view.left_s == 5.0
    assert dataclasses.replace(view, bytes_per_s=0.0).left_s is None
    assert dataclasses.replace(view, done_bytes=1000, bytes_per_s=0.0).left_s == 0.0
