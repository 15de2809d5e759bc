"""What is printable: one rule of code points in both readers, whatever Python's tables say."""

from __future__ import annotations

import itertools

import pytest

from kvpack import limits
from kvpack.errors import LimitError
from kvpack.printable import REFUSED, is_printable
from tests.reference.scan import text
from tests.reference.verdict import Refused

_LAST = 0x10FFFF


def _refused_by_the_second_reader(point: int) -> bool:
    try:
        text(chr(point).encode(), "x", "x")
    except (Refused, UnicodeEncodeError):
        return True
    return False


def test_both_readers_refuse_the_same_code_points() -> None:
    # Above plane 1 every plane but the last three is alike.
    for points in (range(0x20000), range(0xDFF00, 0xE0100), range(_LAST - 0x100, _LAST + 1)):
        ours = [point for point in points if not is_printable(chr(point))]
        assert ours == [point for point in points if _refused_by_the_second_reader(point)]


def test_no_text_that_moves_a_cursor_or_hides_itself_is_printable() -> None:
    bidi = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    for point in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *bidi):
        assert not is_printable(f"a{chr(point)}b"), hex(point)
    for plane in range(17):
        assert not is_printable(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF))


def test_the_ranges_ascend_and_do_not_touch() -> None:
    bounds = [bound for pair in REFUSED for bound in pair]
    assert bounds == sorted(bounds)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(REFUSED))


@pytest.mark.parametrize("name", ["acme", "ä", "部門", "\u0378", "👩", "a b"])
def test_names_of_any_script_are_good(name: str) -> None:
    assert limits.check_name("tenant", name) == name


@pytest.mark.parametrize("name", ["", "a\nb", "a\u202eb", "\ue000", "\ud800", "x" * 257])
def test_a_name_that_is_not_printable_is_refused_by_field(name: str) -> None:
    with pytest.raises(LimitError, match="tenant: expected 1 to 256 printable bytes"):
        limits.check_name("tenant", name)
