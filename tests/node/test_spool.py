"""The file that a transfer is written into: what was closed is never written to again."""

from __future__ import annotations

import os

import pytest

from kvpack.bundle import encode_header
from kvpack.chunk import SealContext, seal_token_ids
from kvpack.errors import PublishError
from kvpack.header import Header
from kvpack.identity import Identity
from kvpack.keys import generate_key
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout
from node.migration.spool import Spool, left_over

KEY = generate_key("tests")
LAYOUT = CacheLayout((LayerLayout(LayerKind.FULL, None, 1, 2, 2),), Encoding.F16LE, 1024)
HEADER = Header.of(
    Identity("tests", bytes(32), "none", bytes(32), bytes(32), bytes(32), "abi/1", LAYOUT),
    KEY.epoch,
)


@pytest.fixture
def chunk():
    context = SealContext(KEY, HEADER.identity_digest, HEADER.layout_digest)
    (sealed,) = seal_token_ids(context, (1, 2, 3))
    return memoryview(sealed.object)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "pack", KEY, encode_header(HEADER))


@pytest.mark.parametrize("ending", ["suspend", "drop"])
def test_a_chunk_that_comes_after_the_end_is_refused_and_meets_no_other_file(
    spool, chunk, tmp_path, ending
):
    spool.add(chunk)
    number = spool._descriptor
    getattr(spool, ending)()
    # The next file that is opened gets the number that the closed one had.
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    try:
        assert other == number
        with pytest.raises(PublishError, match="is closed"):
            spool.add(chunk)
        assert os.fstat(other).st_size == 0
    finally:
        os.close(other)
    assert spool.durable_objects == 0
    kept = left_over(tmp_path / "pack")
    assert [path.stat().st_size > len(chunk) for path in kept] == [True] * (ending == "suspend")


def test_what_ended_is_not_published(spool, chunk, tmp_path):
    spool.add(chunk)
    spool.suspend()
    with pytest.raises(RuntimeError, match="published or dropped"):
        spool.publish(b"")
    assert not (tmp_path / "pack").exists()
