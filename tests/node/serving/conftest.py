"""Fixtures of the serving tests."""

from ladder_fixtures import engines, laddered

__all__ = ["engines", "laddered"]
