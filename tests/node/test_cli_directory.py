"""``kvnode directory`` as a person runs it."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from directory_support import Place, nonce

from kvpack.errors import EXIT_USAGE
from node.cli import main
from node.directory_seen import Seen, SeenDirectory
from node.directory_sqlite import SqliteDirectory


@pytest.fixture
def path(tmp_path):
    return tmp_path / "directory.sqlite"


def kvnode(*arguments):
    return CliRunner().invoke(main, [str(one) for one in arguments])


def in_directory(path, work):
    async def opened():
        directory = SqliteDirectory(path)
        try:
            return await work(directory)
        finally:
            await directory.close()

    return asyncio.run(opened())


async def fill(directory):
    await directory.register("a", nonce(1), 600.0)
    await directory.claim("kept", "a", nonce(1))
    await directory.release("gone", await directory.claim("gone", "b", nonce(2)))


def test_show_tells_owned_released_and_unknown_apart(path):
    in_directory(path, fill)
    asked = ("--session", "kept", "--session", "gone", "--session", "lost", "--node", "a")
    shown = kvnode("directory", "show", "--directory", f"sqlite:{path}", *asked, "--node", "b")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[1:4] == [
        "session kept: owned by node a, generation 1, revision 1",
        "session gone: released by node b, generation 1, revision 2",
        "session lost: unknown to this directory",
    ]
    assert shown.stdout.splitlines()[5] == "node b: no lease, 0 sessions"
    found = json.loads(
        kvnode("directory", "show", "--directory", f"sqlite:{path}", *asked, "--json").stdout
    )
    assert [one["is"] for one in found["sessions"]] == ["owned", "released", "unknown"]
    assert 0 < found["nodes"][0]["lease_left_s"] <= 600
    assert (found["generation"], found["revision"]) == (1, 3)


def test_adopt_raises_the_generation_above_all_that_was_seen(path, tmp_path):
    in_directory(path, fill)
    adopted = kvnode("directory", "adopt", "--directory", f"sqlite:{path}", "--json")
    assert json.loads(adopted.stdout)["generation"] == 2

    async def see(directory):
        seen = Seen(tmp_path / "data" / "directory-seen.sqlite")
        await SeenDirectory(directory, seen).state()
        state = await directory.state()
        await seen.note(state.directory_id, 9, 1)
        await seen.close()

    (tmp_path / "data").mkdir()
    in_directory(path, see)
    where = ("directory", "adopt", "--directory", f"sqlite:{path}")
    assert "generation 10," in kvnode(*where, "--seen", tmp_path / "data").stdout
    assert "generation 21," in kvnode(*where, "--above", "20").stdout


def test_takeover_waits_for_the_lease_and_names_its_rest(path):
    in_directory(path, fill)
    where = ("--directory", f"sqlite:{path}", "--node", "b")
    refused = kvnode("directory", "takeover", "kept", *where)
    assert refused.exit_code == 1 and refused.stdout == ""
    assert "the lease of its owner, node a, runs for another" in refused.stderr
    in_directory(path, lambda directory: directory.expire("a", nonce(1)))
    taken = kvnode("directory", "takeover", "kept", *where, "--json")
    assert json.loads(taken.stdout) == {
        "session": "kept", "node": "b", "generation": 1, "revision": 4
    }  # fmt: skip
    again = kvnode("directory", "takeover", "kept", *where)
    assert again.exit_code == EXIT_USAGE and "owns it already" in again.stderr
    for session in ("gone", "lost"):
        nobody = kvnode("directory", "takeover", session, *where)
        assert nobody.exit_code == 1 and "nobody owns it" in nobody.stderr


def test_bad_input_is_one_line_and_makes_no_file(path, tmp_path):
    in_directory(path, fill)
    there, missing = f"sqlite:{path}", f"sqlite:{tmp_path / 'other.sqlite'}"
    for arguments, part in (
        (("show", "--directory", missing), "no such file"),
        (("adopt", "--directory", missing), "no such file"),
        (("takeover", "s", "--node", "b", "--directory", missing), "no such file"),
        (("show", "--directory", "nats://a"), "expected sqlite:PATH, grpc://"),
        (("show", "--directory", "etcd://a"), "needs this node's credentials"),
        (("show", "--directory", "grpc://a@h:1"), "needs this node's credentials"),
        (("takeover", "s", "--directory", there), "expected --node"),
        (("adopt", "--directory", there, "--seen", tmp_path), "data folder of a node"),
    ):
        done = kvnode("directory", *arguments)
        assert (done.exit_code, done.stdout) == (EXIT_USAGE, ""), arguments
        assert part in done.stderr and len(done.stderr.splitlines()) == 1
    for arguments in (
        ("show", "--directory", there, "--session", "../s"),
        ("takeover", "/", "--node", "b", "--directory", there),
        ("takeover", "kept", "--node", "\n", "--directory", there),
    ):
        done = kvnode("directory", *arguments)
        assert done.exit_code != 0 and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "other.sqlite").exists()


def test_a_directory_of_another_node_is_shown_and_taken_from_but_not_adopted(tmp_path, parties):
    place = Place(tmp_path / "directory.sqlite", parties)

    async def work():
        directory = SqliteDirectory(place.path, place.clock)
        token = await directory.claim("s", "b", nonce(1))
        await directory.register("b", nonce(1), 1.0)
        place.clock.move(1.1)
        async with place.served(directory) as address:
            url = f"grpc://keeper@{address}"
            asked = ("--directory", url, "--credentials", parties / "a")
            shown = await asyncio.to_thread(
                kvnode, "directory", "show", *asked, "--session", "s", "--json"
            )
            assert json.loads(shown.stdout)["sessions"][0]["node"] == "b"
            adopted = await asyncio.to_thread(kvnode, "directory", "adopt", "--directory", url)
            assert adopted.exit_code == EXIT_USAGE
            other = await asyncio.to_thread(
                kvnode, "directory", "takeover", "s", *asked, "--node", "c"
            )
            assert other.exit_code == EXIT_USAGE and "cannot write for node c" in other.stderr
            taken = await asyncio.to_thread(kvnode, "directory", "takeover", "s", *asked)
            assert taken.exit_code == 0, taken.stderr
        assert (await directory.owner("s")).node == "a"
        assert (await directory.owner("s")).token.newer_than(token)
        await directory.close()

    asyncio.run(work())
