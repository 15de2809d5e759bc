"""The directory's file itself, and how directories are addressed.

What every directory does is in ``test_directory_conformance.py``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from directory_support import Place, nonce

from node.directory import open_directory
from node.errors import DirectoryError, StaleTokenError, UsageError


@pytest.fixture
def url(tmp_path):
    return f"sqlite:{tmp_path / 'directory.sqlite'}"


def with_directory(url, work):
    return Place(Path(url.removeprefix("sqlite:"))).run(work)


def _contend(path: str, node: str, rounds: int, start, results) -> None:
    """Take the session over from each token that is seen; tell which takeovers succeeded."""

    async def work():
        directory = open_directory(f"sqlite:{path}")
        won = []
        while True:
            entry = await directory.owner("s")
            number = int.from_bytes(entry.nonce, "big")
            if number == rounds:
                await directory.close()
                return won
            try:
                token = await directory.transfer("s", entry.token, node, nonce(number + 1))
            except StaleTokenError:
                continue
            won.append((number, token.revision))

    start.wait(20)
    results.put((node, asyncio.run(work())))


def test_of_contenders_in_four_processes_exactly_one_takes_over_from_each_token(tmp_path, url):
    rounds = 200

    async def claim(directory):
        return await directory.claim("s", "nobody", nonce(0))

    with_directory(url, claim)
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    path = str(tmp_path / "directory.sqlite")
    workers = [
        context.Process(target=_contend, args=(path, f"n{i}", rounds, start, results))
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    start.set()
    won = [entry for _ in workers for entry in results.get(timeout=60)[1]]
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    assert sorted(number for number, _ in won) == list(range(rounds))
    revisions = [revision for _, revision in sorted(won)]
    assert revisions == sorted(set(revisions))


def test_the_file_is_private_and_neither_a_link_nor_another_programs_file(tmp_path, url):
    async def nothing(directory):
        return None

    old = os.umask(0)
    try:
        with_directory(url, nothing)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "directory.sqlite").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "directory.sqlite")
    (tmp_path / "text").write_text("not a database, but long enough to look like a file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "text", "pipe", "missing/folder"):
        with pytest.raises(DirectoryError):
            open_directory(f"sqlite:{tmp_path / name}")


@pytest.mark.parametrize(
    "url",
    [
        *("sqlite:", "sqlite", "etcd://a", "/tmp/x", "", "grpc:a@h:1", "grpc://h:1", "grpc://@h:1"),
        *("grpc://a@h", "grpc://a@:1", "grpc://a@h:99999", "grpc://a@127.0.0.1:1"),
    ],
)
def test_other_addresses_are_a_usage_error(url):
    with pytest.raises(UsageError):
        open_directory(url)
