"""A name told long ago is still known: before a move, after it, restored, and edited.

The other tests compare bits of a random model, where nothing is remembered that could be lost.
Here the name lies four windows back, or sixteen: only the full layers' rows can tell it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from conversation import (
    ANSWER,
    ANSWER_TOKENS,
    MODEL,
    OTHER_TURN,
    QUESTION,
    QUESTION_AGAIN,
    answer,
    common_tokens,
    read_pack,
    told_long_ago,
    until_end,
)
from test_processes import node, order

import engine
from kvpack.keys import EpochKey, generate_key, load_key_file, write_key_file
from node.demo.stage import SOURCE, TARGET, Stage, _enroll_all

SECONDS = 280.0


@dataclass(frozen=True)
class Told:
    """What one session left: a pack from before the question, and the answers of both nodes."""

    between_tokens: int
    pack: Path
    key: EpochKey
    before_move: str
    after_move: str


async def _ask(client, session, text) -> str:
    """One more turn; gives the answer's text, and leaves it in the session."""
    tokens = await client.tokenize(text)
    session = await client.append(session, tokens)
    index, chosen = session.next_index, []
    async for event in client.generate(session, index, ANSWER_TOKENS):
        chosen.append(event.token_id)
        if len(until_end(chosen)) < len(chosen):
            break
    return await client.detokenize(until_end(chosen))


async def _tell_and_move(stage, between_tokens: int) -> Told:
    async with node(stage, SOURCE) as (_, giving), node(stage, TARGET) as (target, taking):
        template = engine.load_model(MODEL)
        history = told_long_ago(template.encode, between_tokens)
        session = await giving.append(await giving.open("s"), history)
        saved = await giving.save(session)
        before = await _ask(giving, session, QUESTION)
        async for _ in giving.migrate(order(await giving.get("s"), target, [])):
            pass
        after = await _ask(taking, await taking.get("s"), QUESTION_AGAIN)
        kept = stage.out / "told.kvpack"
        kept.write_bytes(Path(saved.path).read_bytes())
        return Told(between_tokens, kept, load_key_file(stage.key), before, after)


@pytest.fixture(scope="module", params=[1024, pytest.param(4096, marks=pytest.mark.slow)])
def told(request, tmp_path_factory):
    """One session on two real nodes: prefilled once, saved, asked, moved, asked again."""
    out = tmp_path_factory.mktemp("told")
    work = out / "work"
    work.mkdir(mode=0o700)
    stage = Stage(out, work, MODEL)
    write_key_file(stage.key, generate_key("tests"))
    _enroll_all(stage)

    async def bounded():
        async with asyncio.timeout(SECONDS):
            return await _tell_and_move(stage, request.param)

    return asyncio.run(bounded())


@pytest.fixture(scope="module")
def model():
    """The trained model, in this process: neither of the nodes that made the rows."""
    return engine.load_model(MODEL)


def test_a_name_told_long_ago_is_known_before_a_move_and_after_it(told):
    assert told.before_move == ANSWER
    assert told.after_move == ANSWER


def test_it_is_known_after_a_restore_from_a_pack_in_another_process(told, model):
    known, restored = read_pack(model, told.pack, told.key)
    pending = told_long_ago(model.encode, told.between_tokens)[len(known) :]
    assert restored.position == len(known) > told.between_tokens and len(pending) == 1
    chosen, _ = answer(restored, pending + model.encode(QUESTION))
    assert model.decode(chosen) == ANSWER


def test_it_is_known_after_an_edit_of_the_last_turn(told, model):
    history = told_long_ago(model.encode, told.between_tokens)
    first, edited = (history + model.encode(turn) for turn in (OTHER_TURN, QUESTION))
    known, live = read_pack(model, told.pack, told.key)
    wrong, _ = answer(live, first[len(known) :])
    assert model.decode(wrong) != ANSWER
    # The turn is taken back: what both conversations share reaches beyond the pack, which is
    # therefore the way back. The turn that was taken back leaves no trace in any bit.
    assert len(known) <= common_tokens(first + wrong, edited)
    _, restored = read_pack(model, told.pack, told.key)
    chosen, bits = answer(restored, edited[len(known) :])
    assert model.decode(chosen) == ANSWER
    _, untouched = read_pack(model, told.pack, told.key)
    assert answer(untouched, edited[len(known) :]) == (chosen, bits)


def test_it_is_not_known_without_the_full_layers_rows(told, model):
    """The control: an answer that came from anywhere else would make the others worthless."""
    import dataclasses

    from kvpack.layout import LayerKind

    known, restored = read_pack(model, told.pack, told.key)
    snapshot = restored.snapshot(known)
    installer = model.installer(snapshot.position)
    for tile in snapshot.tiles:
        full = tile.spec.kind is LayerKind.FULL and tile.spec.first_position < 256
        data = bytes(len(tile.data)) if full else tile.data
        installer.scatter(dataclasses.replace(tile, data=data))
    pending = told_long_ago(model.encode, told.between_tokens)[len(known) :]
    blank = installer.finish(restored.schedule)
    chosen, _ = answer(blank, pending + model.encode(QUESTION))
    assert model.decode(chosen) != ANSWER
