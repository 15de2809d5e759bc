"""What a log says of an error of this program: where and of which kind, and no word of a user."""

from __future__ import annotations

from node.unexpected import unexpected


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
