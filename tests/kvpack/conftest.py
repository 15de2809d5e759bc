"""Settings for all property tests of the format."""

from __future__ import annotations

from hypothesis import settings

# Two busy cores may hold up any single example; the whole test has pytest's own time limit.
settings.register_profile("kvpack", deadline=None, print_blob=True)
settings.load_profile("kvpack")
