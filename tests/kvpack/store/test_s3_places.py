"""Where a store lies and who we are: URLs, the standard chain, secrets that stay out of sight."""

from __future__ import annotations

import contextlib

import pytest
from store_kit import (
    HEADER,
    KEY,
    KEYRING,
    Session,
    save,
    snapshot,
    state,
    token_ids,
)

from kvpack.errors import FormatError, UnknownKeyError, VersionError
from kvpack.header import Header
from kvpack.keys import EpochKey, Keyring
from kvpack.store import CutReader, find_deepest, list_cuts, names
from kvpack.store.errors import StoreDeniedError, StoreError
from kvpack.store.interface import list_all
from kvpack.store.places import open_place, shown
from node.s3.place import S3Place
from node.s3.reach import S3
from node.s3.settings import S3Settings, settings_from
from node.s3.trouble import Trouble
from tests.s3_server import BLUE, GREEN, OWNER, new_store, new_url, store_at

GOOD_URLS = {
    "s3://abc": ("abc", ""),
    "s3://my-bucket.example/": ("my-bucket.example", ""),
    "s3://bucket/a/b-1/c_2=x": ("bucket", "a/b-1/c_2=x"),
    "s3://bucket/a/": ("bucket", "a"),
}
BAD_URLS = [
    "s3://", "s3:///a", "s3://ab", "s3://Bucket/a", "s3://bucket//a", "s3://bucket/a//b",
    "s3://bucket/../a", "s3://bucket/a/..", "s3://bucket/.hidden", "s3://bucket/a b",
    "s3://bucket/a%2e", "s3://bucket/a\nb", "s3://bucket/" + "a" * 600, "s3://bucket:9000/a",
    "s3://KEY:SECRET@bucket/a", "s3://bucket/a?secret=SECRET", "s3://bucket/a#SECRET",
    "S3://bucket/a", "s3:bucket", "s3://b\u00fccket/a", "/srv/s3",
]  # fmt: skip


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_place_is_a_bucket_and_a_prefix(url) -> None:
    place = S3Place.parse(url)
    assert (place.bucket, place.prefix) == GOOD_URLS[url]
    assert S3Place.parse(place.url) == place


@pytest.mark.parametrize("url", BAD_URLS)
def test_no_other_url_is_a_place_and_none_is_repeated_that_may_hold_a_secret(url) -> None:
    with pytest.raises(StoreError) as caught:
        S3Place.parse(url)
    assert "SECRET" not in str(caught.value) and "SECRET" not in shown(url)


def test_what_lies_below_a_root_is_told_by_whole_segments() -> None:
    root = S3Place.parse("s3://bucket/team")
    below = {"s3://bucket/team/a": True, "s3://bucket/team/a/b": True, "s3://bucket/team": False}
    below |= {"s3://bucket/teams/a": False, "s3://other/team/a": False, "s3://bucket": False}
    assert {url: S3Place.parse(url).is_below(root) for url in below} == below
    assert S3Place.parse("s3://bucket/x").is_below(S3Place.parse("s3://bucket"))


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = FILEKEY\naws_secret_access_key = filesecret%1\n"
        "[team]\naws_access_key_id=TEAMKEY\naws_secret_access_key=teamsecret\n"
        "aws_session_token=teamtoken\n[half]\naws_access_key_id=HALFKEY\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = eu-west-3\n[profile team]\nregion = eu-north-1\n"
        "endpoint_url = https://s3.example\n"
    )
    return tmp_path


def chosen(settings: S3Settings) -> tuple[object, ...]:
    return settings.key_id, settings.secret, settings.token, settings.region, settings.endpoint


def test_the_chain_is_environment_then_files_then_the_machine(home, tmp_path) -> None:
    environment = {"AWS_ACCESS_KEY_ID": "ENVKEY", "AWS_SECRET_ACCESS_KEY": "envsecret"}
    file = ("FILEKEY", "filesecret%1", None, "eu-west-3", None)
    assert chosen(settings_from({}, home)) == file
    of_environment = settings_from({**environment, "AWS_REGION": "us-west-2"}, home)
    assert chosen(of_environment) == ("ENVKEY", "envsecret", None, "us-west-2", None)
    team = settings_from({"AWS_PROFILE": "team"}, home)
    expected = ("TEAMKEY", "teamsecret", "teamtoken", "eu-north-1", "https://s3.example")
    assert chosen(team) == expected
    moved = {"AWS_SHARED_CREDENTIALS_FILE": str(home / ".aws" / "credentials")}
    assert chosen(settings_from(moved, tmp_path / "nobody"))[:2] == file[:2]
    machine = settings_from({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, tmp_path / "nobody")
    assert machine.key_id is None and machine.region == "us-east-1"


def test_no_credentials_half_of_them_and_unreadable_files_are_each_one_clear_error(home) -> None:
    alone = {"AWS_EC2_METADATA_DISABLED": "true"}
    with pytest.raises(StoreDeniedError, match=r"no credentials.*'other'"):
        settings_from({**alone, "AWS_PROFILE": "other"}, home)
    for half in ({"AWS_PROFILE": "half"}, {"AWS_ACCESS_KEY_ID": "ENVKEY"}):
        with pytest.raises(StoreDeniedError, match="without its secret"):
            settings_from(half, home)
    (home / ".aws" / "credentials").write_text("aws_secret_access_key = SECRET\n[")
    with pytest.raises(StoreError, match="not a file of AWS profiles") as caught:
        settings_from({}, home)
    assert "SECRET" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize(
    "endpoint",
    ["http://s3.example", "http://10.0.0.1:9000", "ftp://a", "a", "https://K:SECRET@h", "https://"],
)
def test_an_endpoint_is_https_or_here_and_holds_no_account(endpoint) -> None:
    with pytest.raises(StoreError, match="S3 endpoint") as caught:
        S3Settings("us-east-1", endpoint)
    assert "SECRET" not in str(caught.value)


def test_plain_http_is_spoken_here_and_where_it_was_allowed() -> None:
    assert S3Settings("us-east-1", "http://127.0.0.1:1").is_plain
    assert S3Settings("us-east-1", "http://s3.example", allow_http=True).is_plain


def test_a_machine_that_gives_no_credentials_is_not_the_services_fault() -> None:
    for text in (
        "Error performing PUT http://169.254.169.254/latest/api/token in 2ms - Server returned "
        "non-2xx status code: 403 Forbidden: no",
        "Error performing POST https://sts.eu-west-3.amazonaws.com/ in 9s - HTTP error: TimedOut",
    ):
        trouble = Trouble.of(OSError(text))
        assert not trouble.is_passing
        error = trouble.error("s3://bucket/a")
        assert isinstance(error, StoreDeniedError)
        assert str(error).startswith("s3://bucket/a: no credentials")
    away = Trouble.of(OSError("Error performing GET https://sts.example/x in 1s - Connect"))
    assert away.is_passing and "cannot be reached" in str(away.error("s3://sts.example"))


def test_a_secret_is_in_no_repr() -> None:
    settings = S3Settings("us-east-1", None, "KEYID", "SECRET", "TOKEN")
    assert not {"KEYID", "SECRET", "TOKEN"} & set(repr(settings).replace("'", " ").split())
    assert "SECRET" not in repr(settings)


@pytest.fixture
def owner(s3_server, monkeypatch, tmp_path):
    """The process speaks for the owner, by the environment."""
    for name, value in OWNER.environment(s3_server.endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_store_is_made_once_found_again_and_never_taken_for_another(owner, s3_server) -> None:
    url = new_url()
    with pytest.raises(FormatError, match="none"):
        S3().open(url)
    for create in (True, True, False):
        with contextlib.closing(S3().open(url, create)) as store:
            assert store.place == url
    with contextlib.closing(store_at(s3_server.endpoint, url)) as raw:
        raw._client.overwrite("format", b"kvpack-store-v9\n")
        with pytest.raises(VersionError, match="v9"):
            S3().open(url)
        raw._client.overwrite("format", bytes(5000))
        with pytest.raises(FormatError, match="at most"):
            S3().open(url, create=True)


def test_strays_are_told_and_other_stores_below_are_not_even_listed(owner, s3_server) -> None:
    url = new_url()
    with (
        contextlib.closing(S3().open(url, create=True)) as store,
        contextlib.closing(S3().open(f"{url}/inner", create=True)) as inner,
    ):
        save(inner, Session(token_ids(300)), 300)
        store._client.overwrite("chunks/notes.txt", b"12345")
        store._client.overwrite("letter.txt", b"123")
        found = {(item.name, item.file_bytes, item.is_leftover) for item in store.irregular()}
        assert found == {("chunks/notes.txt", 5, False), ("letter.txt", 3, False)}
        assert list_all(store, "chunks/") == [] and inner.irregular() == ()
        with pytest.raises(FormatError):
            store.remove_leftovers(["letter.txt"])


def test_listing_goes_on_over_the_services_own_pages(owner, monkeypatch) -> None:
    """S3 gives 1,000 names at a time; strays among them count for nothing."""
    monkeypatch.setattr("node.s3.store.PAGE_NAMES", 7)
    with contextlib.closing(S3().open(new_url(), create=True)) as store:
        lineage = bytes([9]) * 16
        wanted = sorted(
            names.Hold(1, number, lineage, names.HoldKind.TURN, bytes(32)).name
            for number in range(40)
        )
        from kvpack.store import ObjectData

        others = [
            names.Hold(1, 1, bytes([fill]) * 16, names.HoldKind.TURN, bytes(32)).name
            for fill in (8, 10)
        ]
        store.put_if_absent([ObjectData(name, b"") for name in (*wanted, *others)])
        for number in range(9):
            store._client.overwrite(f"{wanted[5]}-stray{number}", b"")
        found = list_all(store, names.lineage_prefix(lineage))
        assert [item.name for item in found] == wanted
        page = store.list(names.lineage_prefix(lineage), wanted[9], 5)
        assert [item.name for item in page.objects] == wanted[10:15]
        assert page.next_after == wanted[14]


OTHER = EpochKey("rival", 1, bytes(range(32, 64)))


def test_two_tenants_of_one_prefix_neither_hit_nor_open_each_others_packs(s3_server) -> None:
    import dataclasses

    from store_kit import IDENTITY

    ids = token_ids(601)
    header = Header.of(dataclasses.replace(IDENTITY, tenant="rival"), 1)
    url = new_url()
    with (
        contextlib.closing(new_store(s3_server.endpoint, url)) as ours,
        contextlib.closing(store_at(s3_server.endpoint, url)) as theirs,
    ):
        cut_id = save(ours, Session(ids), 600)
        before = {item.name for kind in names.KINDS for item in list_all(ours, f"{kind}/")}
        ring = Keyring([OTHER])
        found = find_deepest(theirs, ring, OTHER, header, ids)
        assert (found.cut, found.misses, found.position) == (None, (), 0)
        with pytest.raises(UnknownKeyError):
            CutReader(theirs, ring, cut_id)
        mine = save(theirs, Session(ids, header, OTHER), 600, keyring=ring)
        after = {item.name for kind in names.KINDS for item in list_all(ours, f"{kind}/")}
        # The same tokens and rows, and not one object in common: nothing tells that both have it.
        assert len(after) == 2 * len(before) and mine != cut_id
        assert find_deepest(ours, KEYRING, KEY, HEADER, ids).position == 600
        assert len(list(list_cuts(theirs))) == 2


def test_two_accounts_of_one_bucket_see_nothing_of_each_other(s3_server) -> None:
    ids = token_ids(300)
    with (
        contextlib.closing(
            new_store(s3_server.endpoint, "s3://shared/green/x", account=GREEN)
        ) as green,
        contextlib.closing(
            new_store(s3_server.endpoint, "s3://shared/blue/x", account=BLUE)
        ) as blue,
        contextlib.closing(store_at(s3_server.endpoint, "s3://shared/green/x", BLUE)) as thief,
    ):
        cut_id = save(green, Session(ids), 300)
        assert state(CutReader(green, KEYRING, cut_id).snapshot()) == state(snapshot(ids))
        assert find_deepest(blue, KEYRING, KEY, HEADER, ids).cut is None
        cut = names.cut_name(cut_id)
        assert blue.stat([cut]) == (None,) and not blue.list("cuts/").objects
        for call in (
            lambda: thief.get(cut),
            lambda: thief.stat([cut]),
            lambda: thief.list("cuts/"),
            lambda: thief.delete([cut]),
            lambda: thief.identity(bytes(16)),
        ):
            with pytest.raises(StoreDeniedError, match=r"s3://shared/green/x.*403"):
                call()
        assert green.get(cut)


def test_a_scheme_that_nothing_reaches_is_one_clear_error(monkeypatch) -> None:
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(StoreError, match="nothing that is installed"):
        open_place("s3://bucket/a")
    with pytest.raises(StoreError, match="expected a folder's path or s3://"):
        open_place("gs://bucket/a")


def test_the_entry_point_of_the_package_is_the_one_that_is_tried_here() -> None:
    import tomllib
    from importlib.metadata import EntryPoint
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    offered = project["project"]["entry-points"]["kvpack.stores"]
    assert EntryPoint("s3", offered["s3"], "kvpack.stores").load() is S3
