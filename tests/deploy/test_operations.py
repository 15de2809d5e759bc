"""docs/operations.md: recipes are run on real nodes, numbers computed, words compared."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import sys

import click
import pytest
from deploy_support import ROOT, commands_in, parse
from node_support import World, prompt, run
from shell_support import run_shell

from engine import load_model
from kvpack.keys import generate_key, load_key_file, write_key_file
from node import enroll
from node.client import NodeClient
from node.credentials import Role, load_credentials, pin, read_pins
from node.errors import DirectoryWentBackError
from node.handover import copy_tenant_key
from node.http.auth import LiveKeys, add_key
from node.metrics.memory import MemoryShape
from node.migration.book import OPEN_MAX
from node.server import running
from node.serving.dormancy import AWAKE_BYTES
from node.serving.ladder.keeper import WAITING_BYTES_MAX
from node.serving.options import CACHE_BYTES
from node.tenants import KEYS, TenantKeys

PAGE = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
#: What the page calls the reference geometry: window layers, window, full layers, bytes of a row.
REFERENCE = MemoryShape(((2048, 39 * 1024),), 39, 13 * 1024, 13, True, 131_072)


def block(word: str, kind: str = "sh") -> str:
    """The one block that has ``word`` in it."""
    (found,) = (text for name, text in BLOCKS if name == kind and word in text)
    return found


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.fixture
def shell(tmp_path):
    """Runs recipes in a folder; ``shell(text)`` fails where one of their commands does."""
    pipes, folder = tmp_path / "pipes", tmp_path
    pipes.mkdir()

    def work(text):
        ran = run_shell(text, pipes, folder, {})
        assert ran.exit_code == 0, ran.stderr
        return ran.stdout

    work.folder = folder
    return work


def test_every_command_of_the_page_is_understood():
    found = commands_in("\n".join(text for name, text in BLOCKS if name == "sh"))
    assert len(found) >= 15
    for words in found:
        parse(words)
    # In a sentence a command may leave out what it needs, but name nothing that it does not know.
    inline = "\n".join(re.sub(r"\s+", " ", one) for one in re.findall(r"`([^`]+)`", prose()))
    mentioned = commands_in(inline)
    assert len(mentioned) >= 12
    for words in mentioned:
        with contextlib.suppress(click.MissingParameter):
            parse(words)


def prose() -> str:
    return re.sub(r"^```\w+\n.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_files_that_the_page_names_exist():
    table = PAGE[PAGE.index("| file | for |") : PAGE.index("## Starting")]
    rows = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    named = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(named) >= 7
    for path in (*(f"deploy/{one}" for one in named), *re.findall(r"deploy/[\w./-]+\w", PAGE)):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(([\w.-]+\.md)\)", PAGE):
        assert (ROOT / "docs" / path).is_file(), path


def test_every_half_state_that_is_promised_a_name_has_something_to_do_here():
    guarantees = (ROOT / "docs" / "guarantees.md").read_text()
    table = guarantees[guarantees.index("| state | in the log |") :].split("\n\n")[0]
    promised = {line.split("|")[1].strip() for line in table.splitlines()[2:]}
    ours = PAGE[PAGE.index("| state | what to do |") :].split("\n\n")[0]
    answered = {line.split("|")[1].strip() for line in ours.splitlines()[2:]}
    assert answered == promised


def test_alerts_and_metrics_that_are_named_exist():
    rules = (ROOT / "deploy" / "prometheus" / "kvpack.rules.yml").read_text()
    monitoring = (ROOT / "docs" / "monitoring.md").read_text()
    for alert in re.findall(r"\bKvpack[A-Z]\w+", PAGE):
        assert f"alert: {alert}" in rules
    for metric in set(re.findall(r"\bkvpack_[a-z_]+", PAGE)):
        assert metric in monitoring, metric


def test_the_table_of_sizes_and_the_worked_example_are_the_formulas():
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for tokens, rings, full, whole in (map(number, row) for row in rows):
        assert (REFERENCE.ring_bytes(tokens), REFERENCE.full_bytes(tokens)) == (rings, full)
        assert whole == rings + full
    session = REFERENCE.ring_bytes(32_768) + REFERENCE.full_bytes(32_768)
    gib = 1 << 30
    bounds = [AWAKE_BYTES, CACHE_BYTES, WAITING_BYTES_MAX, OPEN_MAX]
    assert bounds == [4 * gib, gib, gib // 4, 4]
    worked = re.search(r"= ([\d,]+) bytes, so (\d+) GiB", PAGE)
    needed = 4 * session + AWAKE_BYTES + CACHE_BYTES + WAITING_BYTES_MAX + gib + 8 * gib
    assert number(worked[1]) == needed
    assert (int(worked[2]) - 1) * gib < needed <= int(worked[2]) * gib


def test_the_program_for_ones_own_model_says_what_its_rows_take(model_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["-", str(model_dir), "100"])
    exec(compile(block("MemoryShape", "python"), "operations.md", "exec"), {})  # noqa: S102
    rings, full, whole = map(int, capsys.readouterr().out.split())
    layout = load_model(model_dir).layout
    per_layer = layout.row_bytes(0)
    # Four layers, the last one full; a window of 16 tokens.
    assert (rings, full, whole) == (3 * 16 * per_layer, 100 * per_layer, rings + full)


def test_a_directory_that_was_backed_up_is_refused_after_its_restore_until_it_is_adopted(
    shell, tmp_path, model_dir
):
    world = World.make(tmp_path, model_dir)
    # The names that things have on the page.
    (tmp_path / "data").symlink_to("source-data")
    (tmp_path / "credentials").symlink_to(world.credentials("source").name)

    async def before():
        async with world.node("source") as (_, client):
            session = await client.append(await client.open("kept"), prompt(20))
            # As the HTTP port does where a tenant comes for the first time.
            TenantKeys(tmp_path / "data" / KEYS).key("alice")
            await asyncio.to_thread(shell, block("source.backup(copy)"))
            await client.open("after")
            return session.token

    token = run(before())
    kept = tmp_path / "backup"
    assert (kept / "tenant.key").read_bytes() == (tmp_path / "tenant.key").read_bytes()
    assert load_key_file(kept / "tenant.key").tenant == "tests"
    assert {path.name for path in (kept / "keys").iterdir()} >= {"alice.key"}
    recipe = block("directory adopt")
    place, adopt = recipe[: recipe.index("kvnode")], recipe[recipe.index("kvnode") :]

    async def start(name):
        async with world.node("source") as (_, client):
            return (await client.append(await client.open(name), prompt(5))).token

    # The second time the node has seen more generations than the copy: --seen rises above them.
    for again in ("new", "newer"):
        shell(place)
        with pytest.raises(DirectoryWentBackError):
            run(start(again))
        assert "generation" in shell(adopt)
        before_it, token = token, run(start(again))
        assert token.generation > before_it.generation


@contextlib.contextmanager
def parties(folder):
    """Credentials of nodes a and b and a client, as the README makes them."""
    write_key_file(folder / "my.key", generate_key("prod"))
    for name in ("a", "b", "client"):
        enroll.enroll(folder / "authority", folder / f"{name}-cred", name)
        copy_tenant_key(folder / "my.key", folder / f"{name}-cred")
    leaf = {name: (folder / f"{name}-cred" / enroll.NODE_CERTIFICATE).read_bytes()
            for name in ("a", "b", "client")}  # fmt: skip
    for name, other in (("a", "b"), ("b", "a")):
        pin(folder / f"{name}-cred", leaf[other], Role.NODE)
        pin(folder / f"{name}-cred", leaf["client"], Role.CLIENT)
        pin(folder / "client-cred", leaf[name], Role.NODE)
    yield


def test_a_certificate_is_renewed_while_its_node_answers(shell, model_dir, tmp_path):
    folder = shell.folder
    world = World.make(tmp_path, model_dir)

    async def work():
        config = dataclasses.replace(world.config("source"), credentials_dir=folder / "a-cred")
        async with running(config) as node:
            async with NodeClient(folder / "client-cred", "a", node.address) as client:
                await client.open("first")
            await asyncio.to_thread(shell, block("enroll renew"))
            async with NodeClient(folder / "client-cred", "a", node.address) as client:
                return [one.session_id for one in await client.list_sessions()]

    with parties(folder):
        before = load_credentials(folder / "a-cred").certificate_pem
        assert run(work()) == ["first"]
    now = load_credentials(folder / "a-cred").certificate_pem
    assert now != before
    for name in ("b", "client"):
        (pinned,) = (one for one in read_pins(folder / f"{name}-cred", Role.NODE)
                     if one.name == "a")  # fmt: skip
        assert pinned.certificate_pem == now


def test_api_keys_are_replaced_under_a_node_that_reads_them(shell):
    file = shell.folder / "api-keys"
    old = add_key(file, "prod")
    live = LiveKeys(file)
    assert live.caller(old)
    shell(block("apikey add"))
    new = (shell.folder / "new.key").read_text().split()[-1]
    assert live.caller(new).is_admin
    assert live.caller(old) is None
