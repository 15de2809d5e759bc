"""Section 12: reasons and exit codes."""

from __future__ import annotations

_EXITS = {
    "failure": 1,
    "bad_key_file": 1,
    "malformed": 10,
    "over_limit": 10,
    "unsupported_version": 10,
    "not_authentic": 11,
    "unknown_key": 11,
    "identity_mismatch": 12,
    "layout_mismatch": 12,
    "incomplete": 14,
}


class Refused(Exception):
    """A pack that is not good: ``reason`` of section 12, and the ``stage`` that found it."""

    def __init__(self, reason: str, stage: str, detail: str) -> None:
        super().__init__(f"{stage}: {detail} ({reason})")
        self.reason = reason
        self.stage = stage

    @property
    def exit_code(self) -> int:
        """What a command exits with."""
        return _EXITS[self.reason]


def need(good: bool, stage: str, detail: str, reason: str = "malformed") -> None:
    """Refuse unless ``good``.

    Raises:
        Refused: It is not.
    """
    if not good:
        raise Refused(reason, stage, detail)


def cap(value: int, most: int, stage: str, what: str) -> None:
    """Refuse a value above its cap.

    Raises:
        Refused: ``over_limit``.
    """
    need(value <= most, stage, f"{what} {value} is above {most}", "over_limit")
