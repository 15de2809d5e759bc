"""The rule that decides: orders are obeyed, and nothing is compressed that nobody knows is slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.chunk import Codec
from kvpack.compression import PAYS_UP_TO_BITS_PER_S, Compression, choose_codec
from kvpack.errors import LimitError

GIGABIT = 10**9


@pytest.mark.parametrize(
    ("bits_per_s", "expected"),
    [
        (1, Codec.ZSTD_SPLIT),
        (GIGABIT, Codec.ZSTD_SPLIT),
        (int(2.5 * GIGABIT), Codec.ZSTD_SPLIT),
        (PAYS_UP_TO_BITS_PER_S, Codec.ZSTD_SPLIT),
        (PAYS_UP_TO_BITS_PER_S + 1, Codec.RAW),
        (5 * GIGABIT, Codec.RAW),
        (10 * GIGABIT, Codec.RAW),
        (100 * GIGABIT, Codec.RAW),
        (None, Codec.RAW),
    ],
)
def test_auto_asks_the_rate(bits_per_s: int | None, expected: Codec) -> None:
    assert choose_codec(Compression.AUTO, bits_per_s) is expected


@given(st.none() | st.integers(1, 10**15))
def test_orders_are_obeyed_at_any_rate(bits_per_s: int | None) -> None:
    assert choose_codec(Compression.OFF, bits_per_s) is Codec.RAW
    assert choose_codec(Compression.ON, bits_per_s) is Codec.ZSTD_SPLIT


@given(st.integers(1, 10**15), st.integers(1, 10**15))
def test_a_slower_medium_is_never_compressed_less(one: int, other: int) -> None:
    slow, fast = sorted((one, other))
    if choose_codec(Compression.AUTO, fast) is Codec.ZSTD_SPLIT:
        assert choose_codec(Compression.AUTO, slow) is Codec.ZSTD_SPLIT


@pytest.mark.parametrize("rate", [0, -1, 10**15 + 1, True, 1.5, float("nan")])
@pytest.mark.parametrize("wanted", list(Compression))
def test_a_rate_that_is_none_is_refused(wanted: Compression, rate: int) -> None:
    with pytest.raises(LimitError, match="bits_per_s"):
        choose_codec(wanted, rate)
