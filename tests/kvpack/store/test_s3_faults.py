"""A service that refuses, is away, is slow, answers half, or lies: one clear error each."""

from __future__ import annotations

import contextlib
import time

import pytest
from s3_faults import Liar, Proxy, clipped, first, late, lost, serving, short
from store_kit import KEYRING, Session, save, token_ids

from kvpack.errors import KvpackError
from kvpack.store import ConflictError, NotStoredError, ObjectData, names
from kvpack.store.errors import StoreAwayError, StoreDeniedError, StoreUnsafeError
from kvpack.store.probe import probe_store
from node.s3.store import S3Store
from tests.s3_server import OWNER, SHORT, Account, new_store, new_url, store_at

CHUNK = names.chunk_name(bytes(32))
#: Nothing of a request's account or of an answer's body.
SECRETS = (OWNER.key, OWNER.secret, "STRING-TO-SIGN", "http://")


@pytest.fixture(scope="module")
def between(s3_server):
    """One for all tests: a process tries a service that it does not know yet."""
    made = Proxy(s3_server.address)
    with serving(made):
        yield made


@pytest.fixture
def proxy(between):
    yield between
    between.fault = None


@pytest.fixture
def patient(s3_server, proxy):
    """A store that is reached through the proxy, with one chunk in it, as a node waits for it.

    What comes in the end has to come in time on a busy machine, too.
    """
    url = new_url()
    with contextlib.closing(new_store(s3_server.endpoint, url)) as direct:
        direct.put_if_absent([ObjectData(CHUNK, bytes(1000))])
    with contextlib.closing(store_at(proxy.endpoint, url)) as made:
        made.url = url
        # Forty racers at once may take longer than the short patience of the one below.
        made.require_proved()
        proxy.seen.clear()
        yield made


@pytest.fixture
def store(patient, proxy):
    """The same, of somebody who soon gives up."""
    with contextlib.closing(store_at(proxy.endpoint, patient.url, patience=SHORT)) as made:
        made.require_proved()
        proxy.seen.clear()
        yield made


def calls(store: S3Store):
    """Every kind of request that a store makes."""
    return {
        "get": lambda: store.get(CHUNK),
        "range": lambda: store.get(CHUNK, 10, 5),
        "put": lambda: store.put_if_absent([ObjectData(CHUNK, bytes(1000))]),
        "stat": lambda: store.stat([CHUNK]),
        "list": lambda: store.list("chunks/"),
        "delete": lambda: store.delete([CHUNK]),
        "identity": lambda: store.identity(bytes(16)),
    }


CALLS = ("get", "range", "put", "stat", "list", "delete", "identity")


def fails(call, kind) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("s3://shared/t") and "\n" not in text, text
    # Neither in the message nor in what a log of the exception would show.
    assert caught.value.__cause__ is None or caught.value.__suppress_context__
    assert not [secret for secret in SECRETS if secret in text]
    return text


@pytest.mark.parametrize("name", CALLS)
def test_refusals_are_told_at_once_and_name_the_store(store, proxy, name) -> None:
    proxy.fault = lambda handler: handler.refuse(403, "AccessDenied")
    text = fails(calls(store)[name], StoreDeniedError)
    assert "403" in text and len(proxy.seen) == 1
    proxy.fault = lambda handler: handler.refuse(403, "RequestTimeTooSkewed")
    if name != "stat":  # a HEAD has no body to say so in
        assert "clock" in fails(calls(store)["get"], StoreDeniedError)


@pytest.mark.parametrize("name", CALLS)
def test_a_service_in_trouble_is_asked_again_and_then_answers(patient, proxy, name) -> None:
    for status in (500, 503):
        proxy.fault = first(2, lambda handler, status=status: handler.refuse(status, "SlowDown"))
        calls(patient)[name]()


@pytest.mark.parametrize("status", [500, 503])
def test_a_service_that_stays_in_trouble_is_given_up_in_time(store, proxy, status) -> None:
    proxy.fault = lambda handler: handler.refuse(status, "SlowDown")
    started = time.monotonic()
    assert f"{status} (SlowDown)" in fails(calls(store)["put"], StoreAwayError)
    assert time.monotonic() - started < 10 * (SHORT.retry_s + SHORT.request_s)
    assert 2 <= len(proxy.seen) <= 20


def test_a_missing_object_is_not_a_missing_bucket(store, proxy) -> None:
    with pytest.raises(NotStoredError):
        store.get(names.chunk_name(b"n" * 32))
    proxy.fault = lambda handler: handler.refuse(404, "NoSuchBucket")
    for name in ("get", "list", "identity"):
        with pytest.raises(KvpackError) as caught:
            calls(store)[name]()
        assert not isinstance(caught.value, NotStoredError) and "NoSuchBucket" in str(caught.value)


def test_a_slow_answer_is_waited_for_and_one_that_never_comes_is_not(patient, store, proxy) -> None:
    # Longer than the other one has for all of it.
    proxy.fault = late(SHORT.request_s + 0.5)
    assert patient.get(CHUNK) == bytes(1000)
    proxy.fault = late(SHORT.request_s + 1.0)
    started = time.monotonic()
    assert "in time" in fails(calls(store)["get"], StoreAwayError)
    assert time.monotonic() - started < 10 * (SHORT.retry_s + SHORT.request_s)


def test_half_an_answer_is_asked_for_again_and_never_taken_for_whole(patient, store, proxy) -> None:
    proxy.fault = first(1, short, "GET")
    assert patient.get(CHUNK) == bytes(1000)
    proxy.fault = first(1, short, "GET")
    assert patient.get(CHUNK, 10, 500) == bytes(500)
    proxy.fault = short
    assert "breaks off" in fails(calls(store)["get"], StoreAwayError)


def test_a_part_that_is_sent_as_the_whole_is_not_taken_for_it(store, proxy) -> None:
    proxy.fault = lambda handler: handler.command == "GET" and clipped(handler)
    fails(lambda: store.get(CHUNK, 10, 500), StoreAwayError)
    with pytest.raises(ConflictError):
        store.put_if_absent([ObjectData(CHUNK, bytes(1000))])


def test_a_service_that_is_not_there_is_said_to_be_away() -> None:
    with contextlib.closing(store_at("http://127.0.0.1:1", new_url(), patience=SHORT)) as gone:
        assert "cannot be reached" in fails(lambda: gone.get(CHUNK), StoreAwayError)


def test_a_create_whose_answer_was_lost_is_ours_and_another_ones_is_not(patient, proxy) -> None:
    store = patient
    one, two = names.chunk_name(b"1" * 32), names.chunk_name(b"2" * 32)
    proxy.fault = first(1, lost, "PUT")
    assert store.put_if_absent([ObjectData(one, b"mine")]) == (True,)
    proxy.fault = None
    assert store.put_if_absent([ObjectData(one, b"mine")]) == (False,)
    store.put_if_absent([ObjectData(two, b"theirs")])
    proxy.fault = first(1, lost, "PUT")
    with pytest.raises(ConflictError):
        store.put_if_absent([ObjectData(two, b"mine")])
    assert store.get(two) == b"theirs"


def test_a_whole_save_goes_through_while_answers_are_lost(patient, proxy) -> None:
    store = patient
    count = [0]

    def every_seventh(handler) -> bool:
        count[0] += 1
        return count[0] % 7 == 0 and lost(handler)

    proxy.fault = every_seventh
    cut_id = save(store, Session(token_ids(600)), 600)
    proxy.fault = None
    assert store.get(names.cut_name(cut_id)) and store.list("intents/").objects == ()


def test_a_service_that_lets_two_creates_win_is_refused_before_a_byte_is_kept() -> None:
    liar = Liar()
    with (
        serving(liar),
        contextlib.closing(store_at(liar.endpoint, new_url())) as store,
    ):
        for call in (
            lambda: store.make(b"kvpack-store-v1\n"),
            lambda: store.put_if_absent([ObjectData(CHUNK, b"x")]),
            lambda: store.identity(bytes(16)),
            store.probe,
        ):
            text = fails(call, StoreUnsafeError)
            assert "created twice" in text
        keys = [path.rsplit("/", 1)[1] for path in liar.objects]
        assert "format" not in keys and "identity" not in keys and "0" * 64 not in keys


def test_a_race_that_two_win_is_seen_where_one_after_the_other_is_right(s3_server) -> None:
    class Racy(S3Store):
        """Looks first and then creates, as a gateway without conditions may do."""

        def put_if_absent(self, objects):
            (item,) = objects
            found = self.stat([item.name])[0]
            if found is not None or "-" in item.name:
                return super().put_if_absent(objects)
            time.sleep(0.2)
            self._client.overwrite(item.name, item.data)
            return (True,)

    with contextlib.closing(new_store(s3_server.endpoint)) as good:
        racy = Racy(good._client)
        with contextlib.closing(racy), pytest.raises(StoreUnsafeError, match="at once won"):
            probe_store(racy, b"r" * 16, time.time, lambda: None)


@pytest.mark.parametrize("ahead_s", [-3000, -200, 200, 3000])
def test_a_clock_far_from_the_services_is_named(s3_server, ahead_s) -> None:
    with contextlib.closing(new_store(s3_server.endpoint)) as store:
        with pytest.raises(StoreUnsafeError, match=r"its clock is [+-]\d+ s from ours"):
            probe_store(store, b"k" * 16, lambda: time.time() + ahead_s, lambda: None)
        # Nothing of the trial stays.
        assert all(not store.list(f"{kind}/").objects for kind in names.KINDS)


@pytest.mark.parametrize("near_s", [-60, 0, 60])
def test_a_clock_near_the_services_will_do(s3_server, near_s) -> None:
    with contextlib.closing(new_store(s3_server.endpoint)) as store:
        report = probe_store(store, b"n" * 16, lambda: time.time() + near_s, lambda: None)
    assert abs(report.skew_s + near_s) < 3


def test_wrong_secrets_are_refused_by_the_real_service_and_repeated_nowhere(s3_server) -> None:
    liar = Account(OWNER.key, "not-the-secret-9876543210")
    with contextlib.closing(store_at(s3_server.endpoint, new_url(), liar)) as store:
        text = fails(lambda: store.get(CHUNK), StoreDeniedError)
    assert "SignatureDoesNotMatch" in text and liar.secret not in text
    assert liar.secret not in repr(store.__dict__) and liar.secret not in repr(vars(store._client))


@pytest.mark.slow
def test_a_killed_server_that_comes_back_has_what_it_said_was_kept(tmp_path) -> None:
    from tests.s3_server import running

    with running(tmp_path) as server, contextlib.closing(new_store(server.endpoint)) as store:
        cut_id = save(store, Session(token_ids(600)), 600)
        server.kill()
        server.start()
        from kvpack.store import CutReader, check_store

        assert CutReader(store, KEYRING, cut_id).snapshot().position == 600
        assert list(check_store(store, KEYRING, deep=True)) == []
