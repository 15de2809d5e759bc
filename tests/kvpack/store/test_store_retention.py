"""Where cuts lie, which stay, and who goes first. Pure functions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import layout

from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from kvpack.store.names import Hold, HoldKind
from kvpack.store.retention import (
    cut_cadence_tokens,
    cut_positions,
    eviction_order,
    is_power_of_two_cut,
    retained,
)


def hold(
    position: int, kind: HoldKind = HoldKind.CADENCE, stamp: int | None = None, cut: int = 0
) -> Hold:
    cut_id = (position * 1000 + cut).to_bytes(32, "big")
    return Hold(position if stamp is None else stamp, position, bytes(16), kind, cut_id)


@pytest.mark.parametrize(
    ("window", "prefill", "expected"),
    [
        (2048, 512, 2048),
        (4096, 512, 2048),
        (512, 512, 2048),
        (511, 512, 2048),
        (384, 512, 1536),
        (385, 512, 2048),
        (300, 512, 1536),
        (8, 512, 512),
        (128, 512, 512),
        (129, 512, 1024),
        (64, 384, 768),
        (8, 256, 256),
        (8, 100, 6400),
    ],
)
def test_the_cadence_is_four_windows_at_most_2048_on_both_grids(
    window: int, prefill: int, expected: int
) -> None:
    found = cut_cadence_tokens(layout(window), prefill)
    assert found == expected
    assert found % prefill == 0 and found % 256 == 0


def test_a_model_without_windows_is_cut_every_2048_tokens() -> None:
    full = CacheLayout((LayerLayout(LayerKind.FULL, None, 1, 2, 3),), Encoding.F16LE, 4096)
    assert cut_cadence_tokens(full) == 2048


def test_of_two_windows_the_smaller_one_decides() -> None:
    both = layout(300)
    wide = dataclasses.replace(both.layers[0], window_tokens=4096)
    assert cut_cadence_tokens(dataclasses.replace(both, layers=(wide, *both.layers))) == 1536


def test_cuts_lie_at_the_multiples_that_were_passed() -> None:
    assert list(cut_positions(0, 2047, 2048)) == []
    assert list(cut_positions(0, 2048, 2048)) == [2048]
    assert list(cut_positions(2048, 6200, 2048)) == [4096, 6144]
    assert list(cut_positions(2049, 4096, 2048)) == [4096]


def test_power_of_two_cuts() -> None:
    found = [p for p in range(0, 70_000, 256) if is_power_of_two_cut(p, 2048)]
    assert found == [2048, 4096, 8192, 16384, 32768, 65536]
    assert [p for p in range(0, 13_000, 512) if is_power_of_two_cut(p, 1536)] == [
        1536, 3072, 6144, 12288,
    ]  # fmt: skip


def test_a_long_session_keeps_its_newest_cut_and_the_powers_of_two() -> None:
    holds = [hold(position) for position in range(2048, 61_441, 2048)]
    kept = sorted(h.position for h in retained(holds, 2048))
    assert kept == [2048, 4096, 8192, 16384, 32768, 61440]


def test_the_last_four_turn_ends_stay() -> None:
    turns = [hold(100 * n, HoldKind.TURN) for n in range(1, 8)]
    prompts = [hold(100 * n - 50, HoldKind.PROMPT) for n in range(1, 8)]
    kept = sorted(h.position for h in retained([*turns, *prompts], 2048))
    assert kept == [400, 500, 600, 700]
    assert len(retained(turns, 2048, turns_kept=1)) == 1


def test_imports_stay_and_a_later_hold_stands_for_an_earlier_one_on_the_same_cut() -> None:
    imported = hold(77, HoldKind.IMPORT)
    first, again = hold(4000, stamp=1), hold(4000, stamp=9)
    assert retained([imported, first, again], 2048) == {imported, again}
    # Using a turn end again does not take from it that it is one.
    turn, used = hold(300, HoldKind.TURN, stamp=1), hold(300, HoldKind.CADENCE, stamp=2)
    assert turn in retained([turn, used, hold(9000)], 2048)


def test_a_session_that_was_moved_here_stays_however_short_room_is() -> None:
    moved, again = hold(300, HoldKind.MOVED, stamp=1), hold(300, HoldKind.CADENCE, stamp=2)
    deeper = hold(9000, stamp=3)
    assert retained([moved, again, deeper], 2048) == {moved, deeper}
    assert list(eviction_order([moved, again, deeper])) == [again, deeper]


@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(HoldKind), st.integers(0, 5))))
def test_what_is_retained_is_stable_and_never_loses_the_newest(found) -> None:
    holds = [hold(p * 256, kind, stamp) for p, kind, stamp in found]
    kept = retained(holds, 2048)
    assert kept <= set(holds)
    assert retained(kept, 2048) == kept
    if holds:
        assert max(h.position for h in kept) == max(h.position for h in holds)


def test_what_was_used_longest_ago_goes_first_and_the_shallower_of_two() -> None:
    old, deep, shallow = hold(9, stamp=1), hold(8, stamp=2), hold(7, stamp=2)
    assert list(eviction_order([deep, old, shallow])) == [old, shallow, deep]
