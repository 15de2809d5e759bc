"""Moves between two nodes on real sockets: the moved session equals a twin that stayed, bitwise."""

from __future__ import annotations

import pytest
from node_support import WINDOW, World, events, move, prompt, run

from kvpack.layout import LayerKind
from node.errors import PeerAnswerError
from node.migrate import compresses
from node.pb.v1 import session_pb2
from tests.small_model import make_small_model

W = WINDOW
EDGES = (2, W - 1, W, W + 1, W + 2, 2 * W - 1, 2 * W, 2 * W + 1, 2 * W + 2, 5 * W + 3, 257, 600)


async def moved_and_twin(world, length):
    """Move a session of each length; gives its and its twin's next events, per length."""
    pairs = {}
    async with world.pair() as (source, giving, target, taking):
        for tokens in length:
            opened = await giving.open(f"moved-{tokens}")
            result = await move(giving, target, opened, prompt(tokens))
            assert result.continuation_verdict == result.state_verdict == "exact"
            layout = source.sessions.engine.model.layout
            assert result.nope_bytes == layout.state_bytes(LayerKind.FULL, tokens - 1)
            assert result.swa_bytes == layout.state_bytes(LayerKind.SWA, tokens - 1)
            twin = await giving.append(await giving.open(f"twin-{tokens}"), prompt(tokens))
            there = await taking.get(f"moved-{tokens}")
            assert result.first_index == tokens
            pairs[tokens] = (
                await events(taking, there, tokens, 24),
                await events(giving, twin, tokens, 24),
            )
    return pairs


def test_moved_sessions_continue_bit_for_bit_at_every_edge_of_the_window(world):
    pairs = run(moved_and_twin(world, EDGES), 120.0)
    for tokens, (moved, twin) in pairs.items():
        assert len(moved) == 24 and all(logits for _, _, logits in moved)
        assert moved == twin, tokens


def test_a_live_session_moves_on_and_back_and_loses_no_token(world):
    async def work():
        async with world.pair() as (source, giving, target, taking):
            twin = await giving.append(await giving.open("twin"), prompt(70))
            here = await giving.append(await giving.open("s"), prompt(70))
            talked = await events(giving, here, 70, 9)
            first = await move(giving, target, await giving.get("s"))
            there = await taking.get("s")
            talked += await events(taking, there, 79, 30)
            await move(taking, source, await taking.get("s"))
            back = await giving.get("s")
            talked += await events(giving, back, 109, 20)
            expected = await events(giving, twin, 70, 59)
            return talked, expected, first, (here, there, back)

    talked, expected, first, replies = run(work())
    assert talked == expected
    assert first.first_index == 79
    revisions = [reply.token.revision for reply in replies]
    assert revisions == sorted(set(revisions))


def test_tokens_given_after_a_move_continue_as_on_the_twin(world):
    async def work():
        async with world.pair() as (_, giving, target, taking):
            await move(giving, target, await giving.open("s"), prompt(300))
            more = prompt(100, seed=9)
            there = await taking.append(await taking.get("s"), more)
            twin = await giving.append(await giving.open("twin"), prompt(300))
            # The twin makes the same calls: its boundary token, then the rest.
            await events(giving, twin, 300, 1)
            twin = await giving.append(await giving.get("twin"), more)
            index = there.next_index
            return await events(taking, there, index, 8), await events(giving, twin, index, 8)

    moved, twin = run(work())
    assert moved == twin and len(moved) == 8


def test_resume_index_sends_known_tokens_again_and_refuses_unknown_ones(world):
    async def work():
        async with world.node("source") as (_, client):
            session = await client.append(await client.open("s"), prompt(40))
            first = await events(client, session, 40, 6)
            again = await events(client, session, 42, 6)
            with pytest.raises(PeerAnswerError) as refused:
                await events(client, session, 60, 1)
            return first, again, refused.value.peer_reason

    first, again, reason = run(work())
    assert [e[:2] for e in again[:4]] == [e[:2] for e in first[2:]]
    assert [e[0] for e in again] == [42, 43, 44, 45, 46, 47]
    assert reason == "session_state"


def test_the_source_answers_with_the_new_owner_after_a_move(world):
    async def work():
        async with world.pair() as (_, giving, target, _):
            old = await giving.open("s")
            await move(giving, target, old, prompt(50))
            with pytest.raises(PeerAnswerError, match="node target"):
                await giving.append(old, [1])
            assert world.spool("target") == ["source.1.1.kvpack"]

    run(work())


def test_wire_bytes_stay_near_the_payload_and_everything_is_accounted(world):
    async def work():
        async with world.pair() as (_, giving, target, _):
            return await move(giving, target, await giving.open("s"), prompt(2000))

    result = run(work())
    parts = (result.nope_bytes, result.swa_bytes, result.token_bytes, result.session_bytes)
    assert sum(parts) == result.payload_bytes
    assert result.token_bytes == 4 * 1999
    assert result.payload_bytes < result.wire_bytes <= 1.05 * result.payload_bytes
    assert 0.0 < result.hidden_fraction < 1.0
    late = result.payload_bytes_after_zero
    assert result.hidden_fraction == pytest.approx(1 - late / result.payload_bytes)
    phases = result.phases
    assert 0 < phases.pushed_s <= phases.sealed_s <= phases.committed_s
    assert result.exposed_handover_s == pytest.approx(phases.committed_s)


@pytest.mark.parametrize("arch", ["cohere2", "exaone4", "afmoe"])
def test_other_architectures_move_bit_for_bit_too(tmp_path, arch):
    folder = tmp_path / "tiny"
    make_small_model(folder, arch, seed=5, window=W, layers=4)
    (tmp_path / "world").mkdir()
    pairs = run(moved_and_twin(World.make(tmp_path / "world", folder), (5 * W + 3,)))
    moved, twin = pairs[5 * W + 3]
    assert moved == twin and len(moved) == 24


def test_a_node_with_another_model_refuses_and_names_the_difference(world, tmp_path):
    other = tmp_path / "other"
    make_small_model(other, "muse_glimmer", seed=4, window=W, layers=4)

    async def work():
        async with (
            world.node("source") as (_, giving),
            world.node("target", other) as (target, _),
        ):
            session = await giving.append(await giving.open("s"), prompt(40))
            with pytest.raises(PeerAnswerError, match="weights_digest"):
                await move(giving, target, session)
            assert len(await events(giving, session, 40, 2)) == 2

    run(work())


def test_a_sampled_session_continues_its_random_stream_where_it_left_off(world):
    sampling = session_pb2.Sampling(temperature=0.9, top_p=0.95, presence_penalty=0.3, seed=11)

    async def work():
        async with world.pair() as (source, giving, target, taking):
            opened = await giving.append(await giving.open("s", sampling), prompt(70))
            talked = await events(giving, opened, 70, 9)
            live = await source.sessions.find("s")
            live.messages = (b'{"role": "user"}',)
            live.context_epoch = 3
            await move(giving, target, await giving.get("s"))
            there = await taking.get("s")
            assert (there.revision, there.context_epoch) == (1, 3)
            assert (await target.sessions.find("s")).messages == live.messages
            talked += await events(taking, there, 79, 30)
            twin = await giving.append(await giving.open("twin", sampling), prompt(70))
            greedy = await giving.append(await giving.open("greedy"), prompt(70))
            expected = await events(giving, twin, 70, 39)
            return talked, expected, await events(giving, greedy, 70, 39)

    talked, expected, greedy = run(work())
    assert talked == expected
    assert [token for _, token, _ in talked] != [token for _, token, _ in greedy]


def test_compressed_rows_arrive_with_the_same_bits_and_fewer_bytes(world):
    tokens = prompt(900)

    async def work():
        async with world.pair() as (_, giving, target, taking):
            plain = await move(giving, target, await giving.open("plain"), tokens)
            packed = await move(giving, target, await giving.open("packed"), tokens, compress=True)
            left = await events(taking, await taking.get("plain"), 900, 12)
            right = await events(taking, await taking.get("packed"), 900, 12)
            return plain, packed, left, right

    plain, packed, left, right = run(work())
    assert left == right and packed.continuation_verdict == "exact"
    assert packed.payload_bytes == plain.payload_bytes
    assert packed.wire_bytes < 0.97 * plain.wire_bytes


@pytest.mark.parametrize(
    ("gbits", "wanted"), [(None, False), (1.0, True), (4.0, True), (10.0, False)]
)
def test_what_the_link_carries_decides_about_compression(gbits, wanted):
    assert compresses(gbits) is wanted
