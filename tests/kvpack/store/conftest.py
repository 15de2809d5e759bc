"""A real S3 server for the tests of the store, started by the first one that needs it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def s3_server():
    """A test takes a prefix of its own."""
    # Not at the top: a kvpack that is alone has no client for it.
    from tests.s3_server import shared

    return shared()
