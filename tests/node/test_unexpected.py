"""What a log says of an error of this program: where and of which kind, and no word of a user."""

from __future__ import annotations

import grpc
import pytest
from node_support import events, prompt, run

from node.unexpected import unexpected

SECRET = "what somebody wrote"


def fails(text: str) -> None:
    try:
        {}[text]
    except KeyError as error:
        raise ValueError(f"cannot take {text}") from error


def test_kind_and_place_are_said_and_no_words():
    try:
        fails("what somebody wrote")
    except ValueError as error:
        said = unexpected(error)
    assert said.startswith("ValueError at node/test_unexpected.py:")
    assert " fails < node/test_unexpected.py:" in said
    assert said.endswith("; because of KeyError")
    assert "somebody" not in said


def test_an_error_that_was_never_raised_has_no_place():
    assert unexpected(TypeError("x")) == "TypeError at an unknown place"


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError])
def test_an_error_of_a_call_says_nothing_of_a_text_to_its_caller_or_in_the_log(world, caplog, kind):
    """gRPC itself would send its words to the caller, and log them."""

    def breaks(*_, **__):
        raise kind(SECRET)

    async def work():
        async with world.node("source") as (node, client):
            session = await client.append(await client.open("s"), prompt(20))
            live = await node.sessions.find("s")
            live.extend, live.decode_next = breaks, breaks
            # A call with one answer, and one that streams.
            for asked in (client.append(session, [1]), events(client, session, 20, 2)):
                with pytest.raises(Exception) as refused:
                    await asked
                error = refused.value
                while error is not None:
                    assert SECRET not in str(error)
                    if isinstance(error, grpc.aio.AioRpcError):
                        assert error.code() is grpc.StatusCode.UNKNOWN
                        assert "its log says where" in error.details()
                    error = error.__cause__ or error.__context__
            assert len(await client.list_sessions()) == 1

    run(work())
    assert SECRET not in caplog.text
    for method in ("Append", "Generate"):
        said = f"/node.v1.Session/{method}: an error of this program: {kind.__name__} at "
        assert said in caplog.text
