"""Many bytes to and from a bucket: uploads in parts, and objects that are fetched ahead."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpack.errors import PublishError
from kvpack.store import NotStoredError
from node.s3.client import PART_BYTES
from node.s3.store import AHEAD, _Ahead
from node.s3.upload import publish_new
from tests.s3_server import new_url, store_at

DATA = random.Random(5).randbytes(2 * PART_BYTES + 12_345)


@pytest.fixture
def client(s3_server):
    with contextlib.closing(store_at(s3_server.endpoint, new_url())) as store:
        yield store._client


def keys(client) -> list[str]:
    return [item.key for item in client.listing("", "", 100)]


def test_an_upload_in_parts_appears_whole_under_its_name_alone(client) -> None:
    with publish_new(client, "big") as sink:
        for first in range(0, len(DATA), 1_000_003):
            assert sink.write(memoryview(DATA)[first : first + 1_000_003])
        assert keys(client) == []
    assert keys(client) == ["big"] and client.get("big") == DATA
    # A range across the edge of two parts.
    assert client.get("big", PART_BYTES - 5, PART_BYTES + 5) == DATA[PART_BYTES - 5 :][:10]


def test_an_upload_that_fails_or_meets_its_name_leaves_nothing_and_replaces_nothing(client) -> None:
    with pytest.raises(ZeroDivisionError), publish_new(client, "big") as sink:
        sink.write(DATA)
        raise ZeroDivisionError
    assert keys(client) == []
    with pytest.raises(PublishError, match="exists already"), publish_new(client, "late") as sink:
        sink.write(b"ours")
        # Somebody else is faster; the conditional copy tells.
        client.overwrite("late", b"theirs")
    assert keys(client) == ["late"] and client.get("late") == b"theirs"


class Fetching:
    """Counts what is fetched and how many at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.held = 0
        self.most = 0
        self.lock = threading.Lock()

    def __call__(self, name: str) -> bytes:
        with self.lock:
            self.asked.append(name)
            self.held += 1
            self.most = max(self.most, self.held)
        if name == "gone":
            raise NotStoredError(name)
        return name.encode()


@pytest.fixture
def ahead():
    with ThreadPoolExecutor(4) as pool:
        fetch = Fetching()
        yield _Ahead(pool, fetch), fetch


def test_what_is_expected_is_fetched_once_in_order_and_not_too_far_ahead(ahead) -> None:
    reading, fetch = ahead
    names = [f"n{number}" for number in range(40)]
    reading.expect(names)
    assert fetch.asked == []
    for name in names:
        assert reading.take(name) == name.encode()
        with fetch.lock:
            fetch.held -= 1
    assert sorted(fetch.asked) == sorted(names) and 1 < fetch.most <= AHEAD + 1


def test_what_is_skipped_or_asked_otherwise_stops_nothing(ahead) -> None:
    reading, fetch = ahead
    reading.expect([*(f"n{number}" for number in range(30)), "gone"])
    assert reading.take("other") == b"other" and fetch.asked == ["other"]
    for number in range(0, 30, 3):
        assert reading.take(f"n{number}") == f"n{number}".encode()
    assert reading.take("n1") == b"n1"
    with pytest.raises(NotStoredError):
        reading.take("gone")
    reading.clear()
    assert reading.take("n5") == b"n5"
