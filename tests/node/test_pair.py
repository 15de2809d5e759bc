"""Pairing: two real processes, people who say no, keys that go along, and folders afterwards."""

from __future__ import annotations

import shutil
import stat
from types import SimpleNamespace

import pytest
from node_support import run
from pair_support import HOST, Side, Terminal, as_node, files_of, pair_up
from trust_support import ask, channel_of, server

from kvpack.keys import generate_key, load_key_file, write_key_file
from node import enroll
from node.credentials import Role, load_credentials
from node.errors import CredentialsError, PairError
from node.pair.party import prepare
from node.pair.writing import NewFile, writing


@pytest.fixture
def wishes(tmp_path):
    """Listener ``a`` with an authority that is still to be made, and joiner ``b``."""
    authority = tmp_path / "authority"
    return as_node(tmp_path / "a", "a", authority=authority), as_node(tmp_path / "b", "b")


def nothing_is_there(tmp_path):
    return not any((tmp_path / name).exists() for name in ("a", "b", "authority"))


def test_two_processes_pair_and_then_talk_to_each_other(tmp_path):
    authority, a, b = tmp_path / "authority", tmp_path / "a", tmp_path / "b"
    bind = "--bind", f"{HOST}:0"
    one = Terminal("listen", "--credentials", a, "--name", "a", "--authority", authority, *bind)
    address = one.wait_for("listening on ").split()[0]
    two = Terminal("join", "--credentials", b, "--name", "b", address)
    assert one.wait_for("code ") == two.wait_for("code ")
    two.process.stdin.write("yes\n")
    two.process.stdin.flush()
    # Until both have answered, nothing exists.
    assert nothing_is_there(tmp_path) and two.process.poll() is None
    code, said, errors = one.end("yes\n")
    assert code == 0 and said.startswith("b node ") and "hint" not in errors
    code, said, _ = two.end("")
    assert code == 0 and said.startswith("a node ")
    world = SimpleNamespace(credentials=lambda name: tmp_path / name)

    async def ask_of(caller, peer, address) -> str:
        async with channel_of(world, caller, address, peer) as channel:
            return (await ask(channel))[0].name

    async def both():
        async with server(world, "a") as at_a, server(world, "b") as at_b:
            return [await ask_of("b", "a", at_a), await ask_of("a", "b", at_b)]

    assert run(both()) == ["OK", "OK"]
    assert load_credentials(a).authority_pem == load_credentials(b).authority_pem
    for path in (*a.rglob("*"), *b.rglob("*"), *authority.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("who", [0, 1])
def test_a_no_on_either_side_leaves_nothing_on_both(tmp_path, who):
    listen = "listen", "--credentials", tmp_path / "a", "--name", "a"
    one = Terminal(*listen, "--authority", tmp_path / "authority")
    address = one.wait_for("listening on ").split()[0]
    two = Terminal("join", "--credentials", tmp_path / "b", "--name", "b", address)
    assert one.wait_for("code ") == two.wait_for("code ")
    terminals = [one, two]
    code, said, errors = terminals[who].end("y\n")
    assert code == 11 and said == "" and "the codes were not confirmed" in errors
    # The other one is told while its question is still open.
    assert terminals[1 - who].process.wait(60) == 1
    code, said, errors = terminals[1 - who].end("")
    assert code == 1 and said == "" and "the other side stopped" in errors
    assert nothing_is_there(tmp_path)


@pytest.mark.parametrize("giver", [0, 1])
def test_the_tenant_key_goes_only_where_it_was_asked_for_and_confirmed_twice(tmp_path, giver):
    authority, names = tmp_path / "authority", ("a", "b")
    enroll.enroll(authority, tmp_path / names[giver], names[giver])
    key = tmp_path / names[giver] / "tenant.key"
    write_key_file(key, generate_key("acme", 3))
    arrived = tmp_path / names[1 - giver] / "tenant.key"

    def wishes(gives_key):
        made = [as_node(tmp_path / "a", "a", authority=authority), as_node(tmp_path / "b", "b")]
        made[giver] = as_node(
            made[giver].folder, None, authority=made[giver].authority, gives_key=gives_key
        )
        return made

    answers = ["yes\n", "yes\n"]
    answers[giver] = "yes\nno\n"
    ends, _ = pair_up(*wishes(True), answers)
    assert "tenant key was not confirmed" in ends[giver] and not arrived.parent.exists()
    ends, sides = pair_up(*wishes(False))
    assert ends == ("b", "a") and not arrived.exists()
    answers[giver] = "yes\nyes\n"
    ends, sides = pair_up(*wishes(True), answers)
    assert ends == ("b", "a") and arrived.read_bytes() == key.read_bytes()
    assert stat.S_IMODE(arrived.stat().st_mode) == 0o600
    said = sides[1 - giver].lines
    assert any("you get      the tenant key of 'acme', epoch 3" in line for line in said)
    root = key.read_text().split("root: ")[1][:16]
    assert not any(root in line for side in sides for line in side.lines)
    assert load_key_file(arrived).tenant == "acme"
    # The same key again is no change; another one is never written over it.
    assert pair_up(*wishes(True), answers)[0] == ("b", "a")
    for epoch, why in ((4, "is here already"), (3, "exists already")):
        key.unlink()
        write_key_file(key, generate_key("acme", epoch))
        one = Side.listen(wishes(True)[0])
        two = Side.join(wishes(True)[1], one.address)
        for side, answer in zip((one, two), answers, strict=True):
            side.type(answer)
        assert why in (one.end(), two.end())[1 - giver]
        assert arrived.read_bytes() != key.read_bytes()


def test_machines_that_are_enrolled_already_only_pin_each_other(tmp_path):
    for name in ("a", "b"):
        enroll.enroll(tmp_path / "authority", tmp_path / name, name)
    before = load_credentials(tmp_path / "b")
    wishes = as_node(tmp_path / "a", None), as_node(tmp_path / "b", None, role=Role.CLIENT)
    assert pair_up(*wishes)[0] == ("b", "a")
    after = load_credentials(tmp_path / "b")
    assert (after.key_pem, after.certificate_pem) == (before.key_pem, before.certificate_pem)
    assert load_credentials(tmp_path / "a").peer("b", Role.CLIENT)
    assert load_credentials(tmp_path / "b").peer("a", Role.NODE)
    found = files_of(tmp_path)
    # Once more changes nothing.
    assert pair_up(*wishes)[0] == ("b", "a") and files_of(tmp_path) == found


def test_a_request_that_waits_for_its_certificate_gets_it_by_pairing(tmp_path, wishes):
    enroll.make_request(tmp_path / "b", "b")
    waiting = (tmp_path / "b" / enroll.NODE_KEY).read_bytes()
    assert pair_up(*wishes)[0] == ("b", "a")
    assert load_credentials(tmp_path / "b").key_pem == waiting


def test_a_machine_with_a_new_key_needs_renewed_to_be_pinned_beside_its_old_leaf(tmp_path, wishes):
    assert pair_up(*wishes)[0] == ("b", "a")
    again = as_node(tmp_path / "b-anew", "b")
    one = Side.listen(wishes[0])
    two = Side.join(again, one.address)
    assert "--renewed" in one.end() and "the other side stopped" in two.end()
    assert not (tmp_path / "b-anew").exists()
    renewed = as_node(tmp_path / "a", "a", authority=tmp_path / "authority", renewed=True)
    assert pair_up(renewed, again)[0] == ("b", "a")
    assert len(load_credentials(tmp_path / "a").peers) == 2


def refused_pair(listener, joiner) -> tuple[str, str]:
    one = Side.listen(listener)
    two = Side.join(joiner, one.address)
    return one.end(), two.end()


def test_sides_that_do_not_fit_are_told_before_anybody_is_asked(tmp_path, wishes):
    enroll.enroll(tmp_path / "elsewhere", tmp_path / "c", "c")
    stranger = as_node(tmp_path / "c", None)
    assert "enrolled at another authority" in refused_pair(wishes[0], stranger)[0]
    assert "both sides are called 'a'" in refused_pair(wishes[0], as_node(tmp_path / "b", "a"))[0]
    assert "no --authority was given" in refused_pair(stranger, wishes[1])[0]
    clients = [as_node(w.folder, w.name, authority=w.authority, role=Role.CLIENT) for w in wishes]
    assert "both sides are clients" in refused_pair(*clients)[0]
    assert nothing_is_there(tmp_path)


def test_what_cannot_be_prepared_is_refused_before_anything_is_opened(tmp_path):
    with pytest.raises(PairError, match="give the --name"):
        prepare(as_node(tmp_path / "a", None))
    enroll.enroll(tmp_path / "authority", tmp_path / "a", "a")
    with pytest.raises(PairError, match="enrolled as 'a', not 'b'"):
        prepare(as_node(tmp_path / "a", "b"))
    enroll.make_authority(tmp_path / "elsewhere")
    with pytest.raises(PairError, match="another authority"):
        prepare(as_node(tmp_path / "a", None, authority=tmp_path / "elsewhere"))
    with pytest.raises(CredentialsError, match="name 'B'"):
        prepare(as_node(tmp_path / "b", "B"))


FILES = {
    "a": ("authority/ca-key.pem", "authority/ca-cert.pem", "a/node-key.pem", "a/ca-cert.pem",
          "a/node-cert.pem", "a/nodes/b.pem"),
    "b": ("b/node-key.pem", "b/ca-cert.pem", "b/node-cert.pem", "b/nodes/a.pem"),
}  # fmt: skip


@pytest.mark.parametrize("killed", FILES)
def test_what_a_killed_process_leaves_is_gone_on_from(tmp_path, wishes, killed):
    """Files are written in one order: each beginning of it is left, and the pairing done again."""
    names = FILES[killed]
    assert pair_up(*wishes)[0] == ("b", "a")
    whole = tmp_path / "whole"
    whole.mkdir()
    for folder in ("a", "b", "authority"):
        (tmp_path / folder).rename(whole / folder)
    for written in range(1, len(names)):
        for folder in ("a", "b", "authority"):
            if (tmp_path / folder).exists():
                shutil.rmtree(tmp_path / folder)
            shutil.copytree(whole / folder, tmp_path / folder)
        # The other side took back what it wrote: here as if it had been enrolled before.
        other = "b" if killed == "a" else "a"
        (tmp_path / other / "nodes" / f"{killed}.pem").unlink()
        for name in names[written:]:
            (tmp_path / name).unlink()
        if killed == "a":
            shutil.rmtree(tmp_path / "b")
        kept = (tmp_path / names[0]).read_bytes()
        assert pair_up(*wishes)[0] == ("b", "a"), written
        assert (tmp_path / names[0]).read_bytes() == kept


def test_files_that_cannot_all_be_written_are_all_taken_back(tmp_path):
    taken = tmp_path / "taken"
    taken.write_bytes(b"others'")
    files = [NewFile(tmp_path / "new" / "deep" / "one", b"1"), NewFile(taken, b"2")]
    with pytest.raises(CredentialsError, match="exists already"), writing(files):
        raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    with pytest.raises(KeyboardInterrupt), writing([NewFile(tmp_path / "new" / "one", b"1")]):
        assert (tmp_path / "new" / "one").read_bytes() == b"1"
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
