"""Buckets among the places that a node's operator named."""

from __future__ import annotations

import dataclasses
import functools
import logging

import pytest
from click.testing import CliRunner
from node_support import run

from kvpack.store.errors import StoreUnsafeError
from node.cli import main
from node.errors import UsageError
from node.s3.place import S3Place
from node.s3.settings import settings_from
from node.server import running as running_node
from node.stores import StoreRoots, parse_root
from tests.kvpack.store.s3_faults import Liar, serving
from tests.s3_server import OWNER, SHORT


@pytest.fixture
def account(monkeypatch, tmp_path):
    """Gives an account at whatever service is named."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def at(endpoint: str) -> None:
        for name, value in OWNER.environment(endpoint).items():
            monkeypatch.setenv(name, value)

    return at


def test_only_what_lies_below_a_named_place_is_opened(tmp_path):
    roots = StoreRoots((tmp_path, parse_root("s3://bucket/team")))
    assert roots.find("s3://bucket/team/a/") == S3Place("bucket", "team/a")
    assert roots.find(str(tmp_path / "a")) == (tmp_path / "a").resolve()
    for text in (
        "s3://bucket/team", "s3://bucket/teams/a", "s3://other/team/a", "s3://bucket/team/../a",
        "s3://K:SECRET@bucket/team/a", "gs://bucket/team/a", "s3://bucket/team/a?x=SECRET",
        "s3:/bucket", "bucket/team/a", "",
    ):  # fmt: skip
        with pytest.raises(UsageError) as refused:
            roots.find(text)
        assert "SECRET" not in str(refused.value)
    with pytest.raises(UsageError, match="store root"):
        parse_root("s3://Bucket/a")


@pytest.mark.parametrize("place", ["store:s3://K:SECRET@bucket/a", "store:s3://bucket/a?k=SECRET"])
def test_a_secret_in_an_order_goes_nowhere(place):
    for words in (("migrate", "s", "--to", place), ("session", "restore", "s", "--from", place)):
        ran = CliRunner().invoke(main, [*words, "--node", "a@127.0.0.1:1", "--credentials", "no"])
        assert ran.exit_code == 2 and "SECRET" not in ran.output and "account" in ran.output


def test_a_node_does_not_start_on_a_service_that_lets_two_creates_win(world, account):
    liar = Liar()
    account(liar.endpoint)
    config = world.config("source")
    config = dataclasses.replace(config, store_roots=(S3Place("liars", "root"),))

    async def start():
        async with running_node(config):
            pass

    with serving(liar), pytest.raises(StoreUnsafeError, match="s3://liars/root: cannot keep packs"):
        run(start())


def test_a_service_that_is_away_now_keeps_no_node_from_starting(account, caplog, monkeypatch):
    impatient = functools.partial(settings_from, patience=SHORT)
    monkeypatch.setattr("node.s3.reach.settings_from", impatient)
    account("http://127.0.0.1:1")
    roots = StoreRoots((S3Place("awaybucket", "root"),))
    with caplog.at_level(logging.WARNING):
        roots.require_safe()
    assert "s3://awaybucket/root: not tried" in caplog.text
