"""A schedule tells the truth about rows that a speculative block computed and then dropped."""

from __future__ import annotations

import pytest

from kvpack.errors import FormatError, KvpackError, LimitError
from kvpack.identity import CallRun, CallSchedule
from kvpack.limits import SCHEDULE_RUNS_MAX, SPECULATIVE_BLOCK_TOKENS_MAX
from kvpack.wire import decode_schedule, encode_schedule


def test_position_counts_only_rows_that_stayed() -> None:
    schedule = CallSchedule().after_call(512).after_call(16, 13).after_call(16, 13).after_call(1)

    assert schedule.runs == (CallRun(512, 1), CallRun(16, 2, 13), CallRun(1, 1))
    assert schedule.position == 512 + 3 + 3 + 1


def test_calls_that_dropped_differently_are_not_one_run() -> None:
    schedule = CallSchedule().after_call(7).after_call(7, 2).after_call(7, 3).after_call(7)

    assert schedule.runs == (CallRun(7, 1), CallRun(7, 1, 2), CallRun(7, 1, 3), CallRun(7, 1))
    assert schedule.position == 7 + 5 + 4 + 7


@pytest.mark.parametrize(
    ("call_tokens", "dropped"),
    [(1, 1), (7, 7), (7, -1), (16, 16), (17, 1), (512, 1)],
)
def test_a_call_drops_only_what_a_block_can_drop(call_tokens: int, dropped: int) -> None:
    with pytest.raises(LimitError, match="dropped_tokens"):
        CallRun(call_tokens, 1, dropped)


def test_a_full_schedule_refuses_another_run_but_not_another_call() -> None:
    runs = (CallRun(1, 1), CallRun(2, 1)) * (SCHEDULE_RUNS_MAX // 2)
    full = CallSchedule(runs)

    assert full.after_call(2).runs[-1] == CallRun(2, 2)
    with pytest.raises(LimitError, match=r"schedule\.runs"):
        full.after_call(2, 1)


@pytest.mark.parametrize("dropped", range(SPECULATIVE_BLOCK_TOKENS_MAX))
def test_wire_returns_every_schedule_it_was_given(dropped: int) -> None:
    schedule = CallSchedule((CallRun(512, 3), CallRun(16, 4, dropped), CallRun(1, 9)))

    assert decode_schedule(encode_schedule(schedule)) == schedule


def test_a_schedule_without_blocks_has_the_bytes_it_always_had() -> None:
    assert encode_schedule(CallSchedule((CallRun(512, 3),))) == bytes.fromhex("0a05088004 1003")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        # A zero on the wire, one above the cap, as much as the call, a block of 17, a fourth field.
        ("0a06 0810 1001 1800", FormatError),
        ("0a06 0810 1001 1810", LimitError),
        ("0a06 0807 1001 1807", LimitError),
        ("0a06 0811 1001 1801", LimitError),
        ("0a08 0810 1001 1801 2001", FormatError),
    ],
)
def test_wire_refuses_what_no_call_can_drop(data: str, error: type[KvpackError]) -> None:
    with pytest.raises(error):
        decode_schedule(bytes.fromhex(data))
