"""Answers in slots: the bits of a stream alone, from whatever a slot still holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from floor_support import Watched, alone, ask, floor_of, order, read, same, sampled
from node_support import prompt, run

from engine import DecodingState, Logits, TextStream
from engine.errors import ContextLimitError
from kvpack.errors import LimitError
from kvpack.layout import Encoding
from kvpack.store import HoldKind
from node.errors import DrainingError
from node.serving.floor import Floor
from node.serving.logprobs import token_logprob
from node.serving.order import Finished, FinishReason, MissReason, Piece, Prefilled, Rung
from node.serving.reuse import NoReuse
from tests.small_model import make_small_model


def test_an_answer_has_the_bits_of_a_stream_that_is_alone(model_dir):
    async def work():
        async with floor_of(model_dir) as (floor, engine):
            ids = prompt(700)
            answer = await ask(floor, ids, 6, top_logprobs=3)
            (expected,) = await alone(engine, [ids], 6)
            assert same(answer, expected)
            assert answer.events[:3] == [
                Prefilled(0, 700), Prefilled(512, 700), Prefilled(699, 700)
            ]  # fmt: skip
            assert [type(event) for event in answer.events[3:]] == [Piece] * 6 + [Finished]
            assert [piece.index for piece in answer.pieces] == list(range(700, 706))
            assert answer.finished.token_ids == (*ids, *answer.ids)
            assert answer.finished.reason is FinishReason.LENGTH
            data = b"".join(engine.model.token_bytes()(token) for token in answer.ids)
            assert answer.text == data.decode("utf-8", "replace")
            usage = answer.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (700, 6)
            assert (usage.cached_tokens, usage.evaluated_tokens) == (0, 700)
            assert (usage.rung, usage.miss) == (Rung.NONE, MissReason.DISABLED)
            assert 0 <= usage.queued_s < usage.first_token_s

    run(work())


def test_sampled_answers_depend_on_their_seed_alone(model_dir):
    async def work():
        async with floor_of(model_dir, slots=2) as (floor, engine):
            runs = [
                floor.submit(order(prompt(40, k), 8, decoding=sampled(k), top_logprobs=3))
                for k in (1, 2)
            ]
            for k, each in zip((1, 2), runs, strict=True):
                answer = await read(each)
                (expected,) = await alone(engine, [prompt(40, k)], 8, sampled(k))
                assert same(answer, expected)

    run(work())


def test_the_next_turn_goes_on_in_the_slot_of_the_last(model_dir):
    async def work():
        async with floor_of(model_dir, slots=2) as (floor, engine):
            first = await ask(floor, prompt(90), 5)
            # Another conversation takes the other slot, not this one.
            await ask(floor, prompt(50, 9), 5)
            more = prompt(30, 2)
            second = await ask(floor, (*first.finished.token_ids, *more), 5, top_logprobs=3)
            expected = await alone(engine, [prompt(90), more], 5)
            assert same(second, expected[1])
            assert second.usage.cached_tokens == 94 and second.usage.evaluated_tokens == 31
            assert (second.usage.rung, second.usage.miss) == (Rung.CURRENT, MissReason.NONE)
            assert floor.counts.continuations == 1

    run(work())


@pytest.mark.parametrize("kept", [89, 90, 91, 74, 16, 1])
def test_what_a_ring_cannot_go_back_to_is_computed_again(model_dir, kept):
    """An exact repeat, one token less, a window less: a ring is never trimmed to fit."""

    async def work():
        async with floor_of(model_dir, slots=1) as (floor, engine):
            ids = prompt(90)
            await ask(floor, ids, 5)
            shorter = prompt(91)[:kept]
            for _ in range(2):
                answer = await ask(floor, shorter, 5, top_logprobs=3)
                (expected,) = await alone(engine, [shorter], 5)
                assert same(answer, expected)
                assert answer.usage.cached_tokens == 0
            again = await ask(floor, ids, 5, top_logprobs=3)
            (expected,) = await alone(engine, [ids], 5)
            assert same(again, expected)

    run(work())


def test_nobody_goes_on_in_the_context_of_another_tenant(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, engine):
            first = await ask(floor, prompt(60), 3)
            theirs = await ask(floor, first.finished.token_ids, 3, tenant="u", top_logprobs=3)
            assert theirs.usage.cached_tokens == 0
            # Fed in another way than the first turn was: the calls of a fresh prompt.
            (expected,) = await alone(engine, [first.finished.token_ids], 3)
            assert same(theirs, expected)

    run(work())


def test_an_order_may_refuse_reuse_and_may_leave_nothing(model_dir):
    async def work():
        async with floor_of(model_dir, slots=1) as (floor, _):
            first = await ask(floor, prompt(60), 3)
            fresh = await ask(floor, first.finished.token_ids, 3, reuse=False)
            assert fresh.usage.cached_tokens == 0
            private = await ask(floor, fresh.finished.token_ids, 3, keep=False)
            assert private.usage.rung is Rung.CURRENT
            assert floor.status().slots[0].known_tokens == 0
            after = await ask(floor, private.finished.token_ids, 3)
            assert after.usage.cached_tokens == 0

    run(work())


def test_an_end_token_is_known_and_is_no_text(model_dir):
    async def work():
        async with floor_of(model_dir) as (floor, engine):
            (expected,) = await alone(engine, [prompt(20)], 8)
            end = next(d for d in expected[2:] if d.token_id not in
                       {e.token_id for e in expected[: d.index - 20]})  # fmt: skip
            answer = await ask(floor, prompt(20), 8, end_ids=frozenset({end.token_id}))
            assert answer.finished.reason is FinishReason.STOP
            assert answer.ids[-1] == end.token_id and answer.pieces[-1].text == ""
            assert answer.finished.token_ids[-1] == end.token_id
            assert answer.usage.completion_tokens == end.index - 20 + 1

    run(work())


def test_no_part_of_a_stop_string_is_told(model_dir):
    async def work():
        async with floor_of(model_dir) as (floor, _):
            whole = await ask(floor, prompt(20), 24)
            text = whole.text
            for first, last in ((0, 1), (3, 5), (2, 11), (len(text) - 2, len(text))):
                stop = text[first:last]
                decoding = DecodingState(text=TextStream(stops=(stop,)))
                answer = await ask(floor, prompt(20), 24, decoding=decoding)
                assert answer.text == text[: text.index(stop)]
                assert answer.finished.reason is FinishReason.STOP
                # All tokens that were generated are known: the next turn begins with them.
                assert answer.finished.token_ids == (*prompt(20), *whole.ids[: len(answer.ids)])
            near = DecodingState(text=TextStream(stops=(text[-1] + "\0never",)))
            answer = await ask(floor, prompt(20), 24, decoding=near)
            assert answer.text == text and answer.finished.reason is FinishReason.LENGTH

    run(work())


def test_the_context_ends_where_the_model_says(tmp_path):
    make_small_model(tmp_path / "m", "muse_glimmer", seed=3, window=16, layers=4)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["max_position_embeddings"] = 64
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))

    async def work():
        async with floor_of(tmp_path / "m") as (floor, _):
            for length in (64, 65, 200):
                with pytest.raises(ContextLimitError, match=f"make it {length + 1}"):
                    floor.submit(order(prompt(length)))
            last = await ask(floor, prompt(63), 50)
            assert len(last.ids) == 1 and last.finished.reason is FinishReason.LENGTH
            answer = await ask(floor, prompt(60), 50)
            assert len(answer.ids) == 4 and len(answer.finished.token_ids) == 64

    run(work())


def test_bad_orders_are_refused_before_they_wait(model_dir):
    async def work():
        async with floor_of(model_dir) as (floor, engine):
            bad = engine.model.vocab_size
            wrong = [
                {"token_ids": [1, bad]},
                {"token_ids": [1], "decoding": sampled(1, logit_bias=((bad, 1.0),))},
            ]
            for fields in wrong:
                with pytest.raises(LimitError, match="token_ids"):
                    floor.submit(order(**fields))
            assert floor.counts.refused == 2 and floor.counts.submitted == 0
            idle = Floor(engine, NoReuse(engine))
            with pytest.raises(DrainingError, match="loading"):
                idle.submit(order([1]))
            for slots in (0, 5):
                with pytest.raises(LimitError, match="slots"):
                    Floor(engine, NoReuse(engine), slots=slots)

    run(work())


def test_cuts_are_asked_for_where_they_belong_and_before_they_are_overwritten(model_dir):
    async def work():
        async with floor_of(model_dir) as (_, engine):
            ladder = Watched(engine, cadence=256)
            watched = Floor(engine, ladder, slots=1)
            watched.start()
            ids = prompt(600)
            answer = await ask(watched, ids, 3)
            tokens = answer.finished.token_ids
            assert ladder.cuts == [
                (HoldKind.CADENCE, 512, tokens[:512]),
                (HoldKind.PROMPT, 599, tokens[:599]),
                (HoldKind.TURN, 602, tokens[:602]),
            ]
            # The next turn goes on in the same trail, across another multiple while it decodes.
            more = (*tokens, *prompt(160, 4))
            await ask(watched, more, 8)
            assert [cut[:2] for cut in ladder.cuts[3:]] == [
                (HoldKind.PROMPT, 762), (HoldKind.CADENCE, 768), (HoldKind.TURN, 770)
            ]  # fmt: skip
            assert len(ladder.trails) == 1 and ladder.trails[0].ended == 0
            await ask(watched, prompt(30, 7), 2, keep=False)
            assert len(ladder.cuts) == 6 and ladder.trails[0].ended == 1
            # Asked for what is deeper than the slot; not where nothing can be.
            assert ladder.begun == [(600, 0), (763, 602), (30, 0)]

    run(work())


def test_log_probabilities_are_those_of_the_raw_logits():
    values = np.array([1.0, 3.0, 3.0, -np.inf, 2.0], np.float32)
    logits = Logits(Encoding.F32LE, values.tobytes())
    found = token_logprob(logits, 4, 3)
    shares = np.exp(values.astype(np.float64)) / np.exp(values.astype(np.float64)).sum()
    assert found.token_id == 4 and np.isclose(found.logprob, np.log(shares[4]))
    assert [token for token, _ in found.top] == [1, 2, 4]
    assert np.allclose([value for _, value in found.top], np.log(shares[[1, 2, 4]]))
    assert token_logprob(logits, 0, 0).top == ()
    assert [token for token, _ in token_logprob(logits, 0, 1).top] == [1]
