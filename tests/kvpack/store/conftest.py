"""A real S3 server for the tests of the store, started by the first one that needs it."""

from __future__ import annotations

import pytest

from tests.s3_server import running


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """One server for all tests of this process; a test takes a prefix of its own."""
    with running(tmp_path_factory.mktemp("s3")) as server:
        yield server
