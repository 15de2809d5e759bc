"""What a newcomer does wrong in the first hour: one line with what it was, and a remedy."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from node_support import WINDOW, prompt, run

from engine.errors import ModelFolderError
from engine.folder import find_folder
from node.cli import main
from node.credentials import load_credentials
from node.errors import CredentialsError, DirectoryWentBackError
from node.files import read_private
from node.http.auth import LiveKeys
from tests.small_model import make_small_model


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def one_line(result, code):
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and result.stdout == ""
    return lines[0]


# --- Ctrl-C before the commands are there. ---


@pytest.mark.parametrize("package", ["node", "kvpack"])
def test_an_interrupt_while_it_is_imported_is_one_line_and_130(package):
    starting = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", package, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # It tells of each module that it has imported: click is among the first of the commands'.
    for line in starting.stderr:
        if line.split("|")[-1].strip() == "click":
            starting.send_signal(signal.SIGINT)
            break
    out, err = starting.communicate(timeout=30)
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    name = {"node": "kvnode", "kvpack": "kvpack"}[package]
    assert (starting.returncode, out, said) == (130, "", [f"{name}: error: interrupted"])


# --- Nodes that do not answer, or will not. ---


def test_a_node_that_does_not_answer_is_named_with_its_address_and_what_to_look_at(world):
    line = one_line(
        invoke(
            "session", "list", "--node", "source@127.0.0.1:1",
            "--credentials", world.credentials("client"),
        ),
        1,
    )  # fmt: skip
    assert "node source at 127.0.0.1:1" in line and "--grpc" in line and "certificate" in line


def test_a_caller_that_is_not_pinned_is_told_where_to_pin_what(world):
    async def work():
        async with world.node("source") as (node, _):
            return await asyncio.to_thread(
                invoke, "session", "list", "--node", f"source@{node.address}",
                "--credentials", world.credentials("stranger"),
            )  # fmt: skip

    line = one_line(run(work()), 1)
    assert "node source at 127.0.0.1:" in line and "kvnode pin" in line and "--client" in line


def test_a_list_of_sessions_says_what_its_columns_are(world):
    async def work():
        async with world.node("source") as (node, client):
            await client.append(await client.open("s"), prompt(20))
            options = ("--node", f"source@{node.address}", "--credentials")
            asked = ("session", "list", *options, world.credentials("client"))
            return [await asyncio.to_thread(invoke, *asked, *more) for more in ((), ("--json",))]

    shown, as_json = run(work())
    head, only = shown.stdout.splitlines()
    assert head.split("\t") == ["session", "position", "next_index", "revision", "phase"]
    assert only.split("\t")[0] == "s" and len(only.split("\t")) == 5
    assert len(as_json.stdout.splitlines()) == 1


def test_a_target_with_another_model_ends_a_move_with_the_code_of_a_mismatch(world, tmp_path):
    make_small_model(tmp_path / "strange", "muse_glimmer", seed=4, window=WINDOW, layers=4)

    async def work():
        async with (
            world.node("source") as (source, client),
            world.node("target", tmp_path / "strange") as (target, _),
        ):
            await client.append(await client.open("s"), prompt(20))
            return await asyncio.to_thread(
                invoke, "migrate", "s", "--node", f"source@{source.address}",
                "--to", f"target@{target.address}", "--credentials", world.credentials("client"),
            )  # fmt: skip

    assert "stays on this node" in one_line(run(work()), 12)


# --- Folders and files. ---


def test_a_data_folder_that_knows_another_directory_names_both_ways_out(world):
    async def work():
        async with world.node("source"):
            pass
        (world.root / "directory.sqlite").rename(world.root / "elsewhere.sqlite")
        async with world.node("source"):
            pass

    with pytest.raises(DirectoryWentBackError) as refused:
        run(work())
    said = str(refused.value)
    for word in ("--directory", "--data-dir", "kvnode directory adopt URL", "worked with"):
        assert word in said


def test_files_that_are_missing_or_open_say_what_makes_or_mends_them(tmp_path):
    with pytest.raises(CredentialsError, match="nowhere: no such folder; kvnode enroll"):
        load_credentials(tmp_path / "nowhere")
    with pytest.raises(CredentialsError, match="keys: no such file; kvnode apikey add"):
        LiveKeys(tmp_path / "keys")
    (tmp_path / "key").write_bytes(b"x")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(CredentialsError, match="mode 0644 is too open; chmod 600 it"):
        read_private(tmp_path / "key")
    with pytest.raises(ModelFolderError, match="fetch it first: hf download some/model-4bit"):
        find_folder(Path("some/model-4bit"))


def test_options_that_need_a_client_name_the_variable_that_may_hold_them():
    result = invoke("session", "list", "--node", "a@127.0.0.1:1")
    assert result.exit_code == 2 and "KVNODE_CREDENTIALS" in result.output


def test_the_installed_commands_begin_where_the_modules_do():
    """Both names of a command take the way that answers an interrupt."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {
        "kvpack": "kvpack.__main__:main",
        "kvnode": "node.__main__:main",
    }
