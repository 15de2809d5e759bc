"""Rows of another build leave no cut behind that anybody could take for his own."""

from __future__ import annotations

import pytest
from builds_support import numerics_as
from ladder_support import text
from test_ladder_sessions import TOKEN, go_on, grown

from kvpack.store import HoldKind
from node.errors import ConsentError
from node.packs import state_bytes
from node.serving.order import MissReason
from node.serving.reuse import Base, ForeignTrail
from node.session import Session
from node.stream import Stream


async def foreign(place, name="talk"):
    """A session that build a computed and kept, woken by consent on build b."""
    place.numerics = numerics_as(place.binding("ours").numerics, "a")
    session = await grown(place, text(50), 3, name)
    cut_id = await place.ladder.keep_session("ours", session)
    assert not session.generation.is_mixed
    place.numerics = numerics_as(place.numerics, "b")
    await place.again()
    woken = await place.ladder.restore_session("ours", cut_id, accept_compatible=True)
    assert woken.generation.is_mixed and not woken.base.exact
    return woken.session(name, TOKEN, place.engine.model.vocab_size)


def test_no_trail_of_mixed_rows_takes_cuts_whoever_asks_for_it(laddered):
    async def work(place):
        session = await foreign(place)
        begun = Session("new", TOKEN, session.generation, (), place.engine.model.vocab_size)
        base = Base(session.generation, session.position)
        # A session that moved here, a slot's context that goes on, an answer's first trail.
        for stream, at in ((session, None), (Stream(session.generation), None), (begun, base)):
            trail = place.ladder.trail("ours", stream, at)
            assert isinstance(trail, ForeignTrail) and not trail.due(512)
        await go_on(place, session, text(20, 3), 2)
        with pytest.raises(ConsentError, match="another build"):
            await place.ladder.keep_session("ours", session)
        assert len(place.holds()) == 1

    laddered(work)


@pytest.mark.parametrize("build", ["a", "b"])
def test_a_cut_of_mixed_rows_would_be_found_by_no_build(laddered, build):
    """Whatever a trail does: what is written says what the rows are."""

    async def work(place):
        session = await foreign(place)
        ladder = place.ladder
        await go_on(place, session, text(20, 3), 2)
        trail = ladder._trail("ours", session, None)
        cut_id = await trail.keep(HoldKind.TURN, state_bytes(session, session.position))
        place.numerics = numerics_as(place.numerics, build)
        base = await ladder.begin("ours", (*session.token_ids, 9))
        # Build a still finds what it computed itself.
        assert base.position == (52 if build == "a" else 0) and not base.generation.is_mixed
        assert base.miss is MissReason.NUMERICS_CHANGED
        with pytest.raises(ConsentError, match="mixed_rows"):
            await ladder.restore_session("ours", cut_id)
        woken = await ladder.restore_session("ours", cut_id, accept_compatible=True)
        assert woken.position == session.position and woken.generation.is_mixed

    laddered(work)


def test_a_session_whose_rows_were_computed_anew_is_this_builds_own_again(laddered):
    async def work(place):
        session = await foreign(place)
        staged = Stream(
            (await place.ladder.begin("ours", session.token_ids)).generation,
            session.token_ids, place.engine.model.vocab_size,
        )  # fmt: skip
        staged.trail = place.ladder.trail("ours", staged, None)
        while size := staged.backlog_call(512):
            await place.engine.call(staged.prefill_next, size)
        session.rebuild(staged)
        assert not session.generation.is_mixed
        cut_id = await place.ladder.keep_session("ours", session)
        woken = await place.ladder.restore_session("ours", cut_id)
        assert not woken.generation.is_mixed and woken.base.exact

    laddered(work)
