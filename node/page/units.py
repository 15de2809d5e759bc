"""Numbers as people read them: real units, as many digits as mean something."""

from __future__ import annotations

from typing import Final

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


def bytes_text(count: float) -> str:
    """``count`` bytes with three digits or so: ``0 B``, ``78.0 MiB``, ``1.70 GiB``."""
    size, unit = float(count), 0
    # 1,023.6 KiB would be written with four digits before the point.
    while round(size) >= 1000 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    if unit == 0:
        return f"{size:.0f} B"
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:.{digits}f} {_BYTE_UNITS[unit]}"


def tick_text(count: int, most: int) -> str:
    """``count`` bytes on an axis that ends at ``most``: all ticks of one axis have one unit."""
    unit = 0
    while most >= 1024 and unit < len(_BYTE_UNITS) - 1:
        most, unit = most // 1024, unit + 1
    return f"{count / 1024**unit:g} {_BYTE_UNITS[unit]}" if count else "0"


def count_text(count: int) -> str:
    """With thousands apart: ``130,815``."""
    return f"{count:,}"


def plural(count: int, one: str, many: str = "") -> str:
    """``1 session``, ``3 sessions``."""
    return f"{count_text(count)} {one if count == 1 else many or one + 's'}"


def seconds_text(seconds: float) -> str:
    """A duration: ``84 ms``, ``1.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``, ``4 d 3 h``."""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE_S:
        return f"{whole} s"
    for unit_s, unit, next_s, below in (
        (_MINUTE_S, "min", 1, "s"),
        (_HOUR_S, "h", _MINUTE_S, "min"),
        (_DAY_S, "d", _HOUR_S, "h"),
    ):
        if unit_s == _DAY_S or whole < unit_s * (60 if unit_s == _MINUTE_S else 24):
            rest = whole % unit_s // next_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {below}" if rest else "")
    raise RuntimeError("every duration has a unit")


def ago_text(seconds: float) -> str:
    """How long ago, coarsely: a list need not change every second."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return "just now"
    if seconds < _MINUTE_S:
        return f"{int(seconds) // 10 * 10} s ago"
    if seconds < _HOUR_S:
        return f"{int(seconds) // _MINUTE_S} min ago"
    if seconds < _DAY_S:
        return f"{int(seconds) // _HOUR_S} h ago"
    return f"{int(seconds) // _DAY_S} d ago"


def percent_text(share: float) -> str:
    """A share of 1; neither all nor nothing is said where it is not so."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "> 99 %"
    return f"{share * 100:.0f} %"


def rate_text(per_s: float) -> str:
    """Things per second, with a digit after the point where there are few."""
    if not per_s:
        return "0"
    return f"{per_s:.1f}" if per_s < 100 else f"{per_s:,.0f}"
