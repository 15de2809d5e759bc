"""What is said of rows that more than one build computed: nobody's numerics, in the old bytes."""

from __future__ import annotations

import pytest
from pack_kit import NUMERICS

from kvpack.errors import LimitError
from kvpack.identity import NumericsFingerprint
from kvpack.interchange import Continuation, continuation_of
from kvpack.layout import Producer
from kvpack.limits import NAMED_VALUES_MAX
from kvpack.wire import decode_numerics, encode_numerics


def test_numerics_of_mixed_rows_equal_nobodys_and_name_what_differs() -> None:
    mixed = NUMERICS.of_mixed_rows()

    assert not NUMERICS.is_mixed and mixed.is_mixed
    assert NUMERICS.first_difference(mixed) == ("mixed_rows", "absent", "yes")
    # Rows that went through several hands are no more mixed than before.
    assert mixed.of_mixed_rows() == mixed
    assert continuation_of(Producer.ENGINE, mixed, NUMERICS) is Continuation.COMPATIBLE


def test_they_are_one_more_entry_that_every_reader_of_the_format_takes() -> None:
    mixed = NUMERICS.of_mixed_rows()

    assert mixed.values == (("backend", "cpu"), ("mixed_rows", "yes"), ("mlx", "0.32.4"))
    assert decode_numerics(encode_numerics(mixed)) == mixed


def test_without_room_for_one_more_entry_they_are_refused() -> None:
    full = NumericsFingerprint(tuple((f"{n:04}", "v") for n in range(NAMED_VALUES_MAX)))

    with pytest.raises(LimitError, match="numerics"):
        full.of_mixed_rows()
