"""Records: one transaction for each turn, bounds for each tenant, deleted means gone."""

from __future__ import annotations

import asyncio
import dataclasses
import stat

import pytest

from kvpack.errors import LimitError
from node.chat.transcripts import Transcript
from node.records import (
    Answer,
    Bounds,
    BusyError,
    ConflictError,
    Context,
    ConversationRecord,
    RecordMissingError,
    Records,
    RecordsError,
    RecordsFullError,
    ResponseRecord,
    Turn,
)
from node.serving.transcripts import KeptTranscripts

SECRET = b'{"content":"a sentence nobody else may read","role":"user"}'
DIGEST = bytes(32)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def records(tmp_path, clock):
    made = Records(tmp_path / "records.sqlite", Bounds(responses=3, conversations=2), clock)
    yield made
    asyncio.run(made.close())


def context(*ids, messages=(SECRET,)):
    return Context(messages, token_ids=ids or (1, 2, 3))


def response(name, tenant="a", kept=None, body=b"{}"):
    return ResponseRecord(tenant, name, 5, body, b"[]", kept or context())


def conversation(name="conv_1", **changes):
    return dataclasses.replace(ConversationRecord("a", name, 5), **changes)


def test_response_comes_back_as_it_was_kept(records):
    kept = Context((b"{}", SECRET, b"[1]"), 1, 2, (0, 7, (1 << 31) - 1))
    made = response("resp_1", kept=kept, body=b'{"id":"resp_1"}')
    asyncio.run(records.commit(Turn("a", made)))
    assert asyncio.run(records.response("a", "resp_1")) == made
    assert kept.kept == (b"{}", b"[1]")
    assert kept.dropped == 1


def test_response_of_another_tenant_is_not_there(records):
    asyncio.run(records.commit(Turn("a", response("resp_1"))))
    with pytest.raises(RecordMissingError, match="resp_1"):
        asyncio.run(records.response("b", "resp_1"))
    with pytest.raises(RecordMissingError):
        asyncio.run(records.delete_response("b", "resp_1"))
    asyncio.run(records.response("a", "resp_1"))


def test_longest_unused_response_goes_first(records):
    for name in ("resp_1", "resp_2", "resp_3"):
        asyncio.run(records.commit(Turn("a", response(name))))
    asyncio.run(records.commit(Turn("b", response("resp_1", "b"))))
    asyncio.run(records.commit(Turn("a", response("resp_4"), begun_from="resp_1")))
    with pytest.raises(RecordMissingError):
        asyncio.run(records.response("a", "resp_2"))
    for tenant, name in (("a", "resp_1"), ("a", "resp_3"), ("a", "resp_4"), ("b", "resp_1")):
        asyncio.run(records.response(tenant, name))


def test_bytes_of_a_tenant_are_bounded_and_the_youngest_stays(tmp_path):
    records = Records(tmp_path / "records.sqlite", Bounds(bytes=4096))
    asyncio.run(records.commit(Turn("a", response("resp_1"))))
    asyncio.run(records.commit(Turn("a", response("resp_2", body=b"x" * 5000))))
    with pytest.raises(RecordMissingError):
        asyncio.run(records.response("a", "resp_1"))
    asyncio.run(records.response("a", "resp_2"))
    asyncio.run(records.close())


def test_what_is_deleted_is_nowhere_in_the_files(tmp_path, records):
    kept = context(messages=(SECRET * 50,))
    answer = Answer("key", DIGEST, 200, b'{"id":"resp_1","text":"' + SECRET[12:40] + b'"}')
    asyncio.run(records.commit(Turn("a", response("resp_1", kept=kept), answer=answer)))
    assert any(SECRET[12:40] in path.read_bytes() for path in tmp_path.iterdir())
    asyncio.run(records.delete_response("a", "resp_1"))
    for path in tmp_path.iterdir():
        assert SECRET[12:40] not in path.read_bytes(), path.name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name


def test_turn_of_a_conversation_is_whole_or_not_at_all(records):
    asyncio.run(records.make_conversation(conversation()))
    after = conversation(revision=1, context=context(4, 5), context_epoch=2)
    answer = Answer("key", DIGEST, 200, b"{}")
    turn = Turn("a", response("resp_1", kept=after.context), "", after, 0, answer)
    asyncio.run(records.commit(turn))
    assert asyncio.run(records.conversation("conv_1")) == after
    # The same again: the conversation is at revision 1 by now, so neither record appears.
    again = dataclasses.replace(turn, response=response("resp_2"))
    with pytest.raises(ConflictError, match="expected revision 0, found 1"):
        asyncio.run(records.commit(again))
    with pytest.raises(RecordMissingError):
        asyncio.run(records.response("a", "resp_2"))


def test_response_outlives_its_conversation_and_the_other_way_round(records):
    asyncio.run(records.make_conversation(conversation()))
    for number in (1, 2):
        after = conversation(revision=number, context=context(number, 9))
        turn = Turn("a", response(f"resp_{number}", kept=after.context), "", after, number - 1)
        asyncio.run(records.commit(turn))
    asyncio.run(records.delete_response("a", "resp_2"))
    found = asyncio.run(records.conversation("conv_1"))
    assert found is not None and found.context == context(2, 9)
    asyncio.run(records.delete_conversation(found))
    assert asyncio.run(records.conversation("conv_1")) is None
    assert asyncio.run(records.response("a", "resp_1")).context == context(1, 9)
    with pytest.raises(RecordMissingError):
        asyncio.run(records.commit(Turn("a", None, "", conversation(revision=3), 2)))


def test_conversations_are_bounded_and_named_once(records):
    asyncio.run(records.make_conversation(conversation("conv_1")))
    with pytest.raises(ConflictError, match="taken"):
        asyncio.run(records.make_conversation(conversation("conv_1")))
    asyncio.run(records.make_conversation(conversation("conv_2")))
    with pytest.raises(RecordsFullError, match="as many as it may"):
        asyncio.run(records.make_conversation(conversation("conv_3")))
    other = dataclasses.replace(conversation("conv_4"), tenant="b")
    asyncio.run(records.make_conversation(other))
    assert asyncio.run(records.conversations()) == ["conv_1", "conv_2", "conv_4"]


def test_an_error_of_this_program_in_one_transaction_spoils_no_later_one(records):
    def broken(connection):
        connection.execute("DELETE FROM conversations")
        raise ZeroDivisionError

    asyncio.run(records.make_conversation(conversation()))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(records._run(broken))
    asyncio.run(records.commit(Turn("a", response("resp_1"))))
    assert asyncio.run(records.conversations()) == ["conv_1"]


def test_retry_is_told_what_was_answered_also_after_a_restart(tmp_path, clock):
    async def first(records):
        async with records.one_request("a", "key", DIGEST) as before:
            assert before is None
            with pytest.raises(BusyError, match="still runs"):
                async with records.one_request("a", "key", DIGEST):
                    pass
            with pytest.raises(ConflictError, match="another request"):
                async with records.one_request("a", "key", b"d" * 32):
                    pass
            async with records.one_request("b", "key", b"d" * 32) as other:
                assert other is None
            answer = Answer("key", DIGEST, 200, b'{"id":"resp_1"}')
            await records.commit(Turn("a", answer=answer))
        await records.close()

    async def second(records):
        async with records.one_request("a", "key", DIGEST) as before:
            assert before == Answer("key", DIGEST, 200, b'{"id":"resp_1"}')
        with pytest.raises(ConflictError, match="another request"):
            async with records.one_request("a", "key", b"d" * 32):
                pass
        clock.now_s += Bounds().answer_s + 1
        async with records.one_request("a", "key", b"d" * 32) as before:
            assert before is None
        await records.close()

    asyncio.run(first(Records(tmp_path / "records.sqlite", now=clock)))
    asyncio.run(second(Records(tmp_path / "records.sqlite", now=clock)))


def test_request_that_failed_leaves_no_answer(records):
    async def twice():
        with pytest.raises(RuntimeError, match="hung up"):
            async with records.one_request("a", "key", DIGEST):
                raise RuntimeError("hung up")
        async with records.one_request("a", "key", DIGEST) as before:
            assert before is None

    asyncio.run(twice())


def test_answers_and_transcripts_are_bounded(tmp_path):
    bounds = Bounds(answers=2, answer_bytes=5000, transcripts=2, transcript_bytes=3000)
    records = Records(tmp_path / "records.sqlite", bounds)

    async def fill():
        for number in range(4):
            key, digest = f"key{number}", bytes([number]) * 32
            await records.commit(Turn("a", answer=Answer(key, DIGEST, 200, b"{}")))
            await records.put_transcript("a", digest, bytes([number]) * 100)
        found = []
        for number in range(4):
            async with records.one_request("a", f"key{number}", DIGEST) as before:
                found.append(before is not None)
        assert found == [False, False, True, True]
        for number, size in ((4, 4000), (5, 900), (6, 4500)):
            answer = Answer(f"key{number}", DIGEST, 200, b" " * size)
            await records.commit(Turn("a", answer=answer))
        for number, is_kept in ((4, False), (5, False), (6, True)):
            async with records.one_request("a", f"key{number}", DIGEST) as before:
                assert (before is not None) is is_kept, number
        gone, kept, long = bytes(32), b"\x03" * 32, b"\x04" * 32
        assert await records.get_transcript("a", [gone]) is None
        assert await records.get_transcript("a", [gone, kept]) == (1, b"\x03" * 100)
        assert await records.get_transcript("b", [kept]) is None
        await records.put_transcript("a", long, b"z" * 4000)
        assert await records.get_transcript("a", [kept]) is None
        assert await records.get_transcript("a", [long]) == (0, b"z" * 4000)
        await records.close()

    asyncio.run(fill())


def test_another_programs_file_is_refused(tmp_path):
    path = tmp_path / "records.sqlite"
    path.write_bytes(b"something else entirely, and long enough to be looked at" * 20)
    with pytest.raises(RecordsError, match=r"records: "):
        Records(path)
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordsError):
        Records(link)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Context((SECRET,), 2), "context.lead"),
        (lambda: Context((SECRET,), 1, 0), "context.kept_from"),
        (lambda: Context((b"",)), "context.messages"),
        (lambda: Context((b"x" * (1 << 20),) * 9), "context.messages"),
        (lambda: response("../up"), "session_id"),
        (lambda: response("resp_1", tenant=""), "tenant"),
        (lambda: Answer("", DIGEST, 200, b""), "idempotency_key"),
        (lambda: Answer("k" * 256, DIGEST, 200, b""), "idempotency_key"),
        (lambda: Answer("k", b"", 200, b""), "answer.digest"),
        (lambda: conversation(revision=-1), "conversation.revision"),
        (lambda: Bounds(responses=0), "records.responses"),
    ],
)
def test_value_outside_its_range_cannot_exist(make, field):
    with pytest.raises(LimitError, match=field.replace(".", r"\.")):
        make()


def test_no_text_in_any_repr(records):
    values = (context(), response("resp_1"), conversation(context=context()),
              Answer("k", DIGEST, 200, SECRET), Turn("a", response("resp_1")))  # fmt: skip
    for value in values:
        assert "sentence" not in repr(value)


def test_transcript_of_a_chat_comes_back_after_a_restart(tmp_path):
    async def keep_and_find():
        kept = Transcript((5, 6, (1 << 31) - 1), 2)
        first = Records(tmp_path / "records.sqlite")
        await KeptTranscripts(first).put_transcript("a", DIGEST, kept)
        await first.close()
        second = Records(tmp_path / "records.sqlite")
        found = await KeptTranscripts(second).get_transcript("a", [b"x" * 32, DIGEST])
        assert found == (1, kept)
        await second.close()
        # A database that is away is a miss: a chat goes on without it.
        assert await KeptTranscripts(second).get_transcript("a", [DIGEST]) is None
        await KeptTranscripts(second).put_transcript("a", DIGEST, kept)

    asyncio.run(keep_and_find())
