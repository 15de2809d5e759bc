"""The deepest cut that is an ancestor of a prompt: never a wrong one, never an exception."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_kit import MemoryStore
from store_kit import (
    HEADER,
    IDENTITY,
    KEY,
    KEYRING,
    LINEAGE,
    NOW,
    Session,
    layout,
    save,
    snapshot,
    state,
    token_ids,
)

from kvpack.header import Header
from kvpack.keys import EpochKey, Keyring
from kvpack.store import CutReader, Lookup, Severity, StoreError, check_store, find_deepest, names
from kvpack.store.index import index_names
from kvpack.store.interface import ObjectData

IDS = token_ids(2000)
CUTS = (100, 256, 300, 512, 700, 1024, 1300)


def look(store: MemoryStore, ids: Sequence[int], **options) -> Lookup:
    return find_deepest(store, KEYRING, KEY, HEADER, ids, **options)


@pytest.fixture(scope="module")
def filled() -> MemoryStore:
    store = MemoryStore()
    session = Session(IDS)
    for position in CUTS:
        save(store, session, position)
    return store


@pytest.fixture
def store(filled: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    copy.objects = dict(filled.objects)
    return copy


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(99, 0), (101, 100), (255, 100), (257, 256), (299, 256), (301, 300), (511, 300), (513, 512),
     (699, 512), (701, 700), (1023, 700), (1025, 1024), (1299, 1024), (1301, 1300), (2000, 1300)],
)  # fmt: skip
def test_every_cut_is_found_by_its_continuations(
    store: MemoryStore, asked: int, expected: int
) -> None:
    found = look(store, IDS[:asked])
    assert (found.position, found.misses, found.gaps) == (expected, (), 0)
    if found.cut is not None:
        rows = CutReader(store, KEYRING, found.cut.cut_id).snapshot()
        assert state(rows) == state(snapshot(IDS[:expected]))


@pytest.mark.parametrize("position", CUTS)
def test_a_whole_prompt_needs_the_logits_that_follow_it(store: MemoryStore, position: int) -> None:
    found = look(store, IDS[:position])
    assert found.position < position
    assert found.misses[0].reason == "no_logits"
    session = Session(IDS)
    save(store, session, position, logits=True)
    assert look(store, IDS[:position]).position == position


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.integers(0, 1999), length=st.integers(0, 2000), other=st.integers(1, 40_000))
def test_a_prompt_that_leaves_the_text_gets_a_cut_from_before_it_does(
    filled: MemoryStore, kept: int, length: int, other: int
) -> None:
    ids = [*IDS[:kept], *((one + other) % 50_000 for one in IDS[kept:])][:length]
    found = look(filled, ids)
    best = max((cut for cut in CUTS if cut <= kept and cut < length), default=0)
    assert found.position == best


def test_lookups_are_few(store: MemoryStore) -> None:
    calls: list[str] = []
    plain_list, plain_stat = store.list, store.stat
    store.list = lambda *a: calls.append("list") or plain_list(*a)  # type: ignore[method-assign]
    store.stat = lambda n: calls.append("stat") or plain_stat(n)  # type: ignore[method-assign]
    found = look(store, IDS)
    # 7 blocks: 3 existence checks, 1 for the chunks; 1 listing: the cut lies in the last block.
    assert found.listings == 1
    assert calls.count("stat") <= 5 and calls.count("list") == 1
    cold = look(store, token_ids(2000, seed=3))
    assert (cold.position, cold.listings) == (0, 1)


@pytest.mark.parametrize(
    ("kept", "length", "known", "rivals"),
    [(2000, 2000, 1280, []), (1400, 2000, 1280, []), (1290, 2000, 1280, [1300]),
     (1100, 1500, 1024, []), (1010, 1010, 768, []), (700, 705, 512, []), (640, 700, 512, [700]),
     (90, 200, 0, [100])],
)  # fmt: skip
def test_a_lookup_says_how_far_kept_texts_go_on_like_the_prompt(
    store: MemoryStore, kept: int, length: int, known: int, rivals: list[int]
) -> None:
    ids = [*IDS[:kept], *token_ids(2000, seed=5)][:length]
    found = look(store, ids)
    assert found.known_tokens == known
    others = [CutReader(store, KEYRING, cut_id).cut.position for cut_id in found.rivals]
    assert others == rivals


def test_two_sessions_with_one_prompt_share_it_and_fork_after_it(store: MemoryStore) -> None:
    fork = (*IDS[:1024], *token_ids(800, seed=9))
    other = Session(fork)
    other.grow(1024)
    save(store, other, 1500, lineage=b"f" * 16)
    assert look(store, fork).position == 1500
    assert look(store, IDS).position == 1300
    assert look(store, [*fork[:1499], 3]).position == 1024


def other_header(**changes: object) -> Header:
    return Header.of(dataclasses.replace(IDENTITY, **changes), 1)


@pytest.mark.parametrize(
    "header",
    [
        other_header(weights_digest=bytes(32)),
        other_header(adapter_digest=bytes([9]) * 32),
        other_header(tokenizer_digest=bytes(32)),
        other_header(chat_template_digest=bytes([1]) * 32),
        other_header(engine_abi="abi/2"),
        other_header(quantisation="affine bits=4 group=64"),
        other_header(constants=(("logit_scale", 1),)),
        other_header(layout=layout(299)),
    ],
)
def test_another_model_never_hits(store: MemoryStore, header: Header) -> None:
    found = find_deepest(store, KEYRING, KEY, header, IDS)
    assert (found.position, found.misses) == (0, ())


def test_another_tenant_or_epoch_never_hits(store: MemoryStore) -> None:
    stranger = EpochKey("other", 1, bytes(range(32)))
    theirs = other_header(tenant="other")
    assert find_deepest(store, Keyring([stranger]), stranger, theirs, IDS).position == 0
    newer = EpochKey("acme", 2, bytes(32))
    keyring = Keyring([KEY, newer])
    assert find_deepest(store, keyring, newer, Header.of(IDENTITY, 2), IDS).position == 0
    assert find_deepest(store, keyring, KEY, Header.of(IDENTITY, 2), IDS).position == 1300


def test_after_a_rotation_a_cut_may_refer_to_chunks_of_the_older_epoch(store: MemoryStore) -> None:
    newer, header = EpochKey("acme", 2, bytes(32)), Header.of(IDENTITY, 2)
    old = look(store, IDS[:1100]).cut
    session = Session.restored(IDS, old.manifest, header, newer)
    save(store, session, 1200, keyring=Keyring([KEY, newer]))
    found = find_deepest(store, Keyring([KEY, newer]), newer, header, IDS)
    assert found.position == 1200
    assert {reference.epoch for reference in found.cut.manifest.references} == {1, 2}
    rows = CutReader(store, Keyring([KEY, newer]), found.cut.cut_id).snapshot()
    assert state(rows) == state(snapshot(IDS[:1200]))
    # Once the older key is retired the cut is a miss, not an error.
    retired = find_deepest(store, Keyring([newer]), newer, header, IDS)
    assert [miss.reason for miss in retired.misses] == ["unknown_key"]


def test_what_the_caller_does_not_admit_is_a_counted_miss(store: MemoryStore) -> None:
    found = look(store, IDS, admit=lambda cut: cut.position <= 512)
    assert found.position == 512
    assert [(miss.position, miss.reason) for miss in found.misses] == [
        (1300, "not_admitted"), (1024, "not_admitted"), (700, "not_admitted"),
    ]  # fmt: skip


def test_cuts_of_two_builds_lie_side_by_side(store: MemoryStore) -> None:
    """Equal tokens, other numerics: the second build's cut is not shut out by the first's."""
    session = Session(IDS, salt=b"other kernels")
    cut_id = save(store, session, 1300, lineage=b"b" * 16)
    assert look(store, IDS, admit=lambda cut: cut.cut_id == cut_id).cut.cut_id == cut_id


def test_an_entry_that_lies_about_its_tokens_is_a_miss(store: MemoryStore) -> None:
    """Whoever writes in the folder may point any prompt at any cut of the tenant."""
    victim = look(store, IDS).cut
    ids = token_ids(1400, seed=5)
    planted = index_names(KEY, HEADER, ids[:1300], victim.cut_id)
    store.put_if_absent([ObjectData(name, b"") for name in planted])
    found = look(store, ids)
    assert found.cut is None
    assert [(miss.cut_id, miss.reason) for miss in found.misses] == [
        (victim.cut_id, "other_tokens")
    ]


def test_a_planted_entry_of_another_length_is_a_miss(store: MemoryStore) -> None:
    victim = look(store, IDS[:1100]).cut
    planted = index_names(KEY, HEADER, IDS[:1900], victim.cut_id)
    store.put_if_absent([ObjectData(name, b"") for name in planted])
    found = look(store, IDS)
    assert found.position == 1300
    assert [miss.reason for miss in found.misses] == ["other_tokens"]


def kinds_in(store: MemoryStore) -> list[str]:
    return sorted(store.objects)


def test_any_one_missing_object_is_a_miss_and_never_a_wrong_hit(filled: MemoryStore) -> None:
    for name in kinds_in(filled):
        store = MemoryStore()
        store.objects = {n: data for n, data in filled.objects.items() if n != name}
        found = look(store, IDS)
        assert found.position in (0, *CUTS)
        if names.kind_of(name) in (names.CHUNKS, names.CUTS):
            assert found.position == 1300 or "not_stored" in {m.reason for m in found.misses}
        if found.cut is not None:
            rows = CutReader(store, KEYRING, found.cut.cut_id).snapshot()
            assert state(rows) == state(snapshot(IDS[: found.position]))
        # What is half there is listed.
        if names.kind_of(name) == names.NODES:
            assert "missing_node" in {f.reason for f in check_store(store, KEYRING)}
        if names.kind_of(name) == names.CUTS:
            reasons = {f.reason for f in check_store(store, KEYRING)}
            assert {"dangling_entry", "dangling_hold"} <= reasons


def test_any_one_damaged_object_is_a_miss_or_refused_when_it_is_opened(
    filled: MemoryStore,
) -> None:
    for name in kinds_in(filled):
        data = filled.objects[name]
        for place in {0, len(data) // 2, len(data) - 1} if data else ():
            store = MemoryStore()
            store.objects = dict(filled.objects)
            flipped = bytearray(data)
            flipped[place] ^= 1
            store.objects[name] = bytes(flipped)
            found = look(store, IDS)
            assert found.position in (0, *CUTS)
            findings = list(check_store(store, KEYRING))
            assert any(finding.severity is Severity.DAMAGE for finding in findings)


def test_a_shorter_chunk_is_a_miss(store: MemoryStore) -> None:
    reader = CutReader(store, KEYRING, look(store, IDS).cut.cut_id)
    chunk = names.chunk_name(reader.cut.manifest.references[0].seal_id)
    store.objects[chunk] = store.objects[chunk][:-1]
    assert look(store, IDS).misses != ()


def test_a_store_that_cannot_be_read_is_a_miss_that_says_so(store: MemoryStore) -> None:
    def broken(*_: object):
        raise StoreError("the folder is gone")

    store.list = broken  # type: ignore[method-assign]
    found = look(store, IDS)
    assert found.cut is None
    assert [miss.reason for miss in found.misses] == ["store_failed"]


def test_a_missing_node_costs_depth_and_is_counted_as_a_gap(store: MemoryStore) -> None:
    session = Session(IDS)
    session.grow(1024)
    save(store, session, 1900)
    nodes = [n for n in index_names(KEY, HEADER, IDS[:1900], bytes(32)) if n.startswith("nodes/")]
    assert look(store, IDS).position == 1900
    store.delete([nodes[4]])
    found = look(store, IDS)
    assert found.position in (1024, 1900)
    # The next save of the session puts it back.
    again = Session(IDS)
    again.grow(1024)
    save(store, again, 1950, lineage=LINEAGE, now=NOW + 1)
    assert look(store, IDS).position == 1950


def test_names_hold_neither_tokens_nor_tenant(filled: MemoryStore) -> None:
    text = "\n".join(filled.objects)
    assert "acme" not in text and b"acme".hex() not in text
    for token in IDS[:50]:
        assert token.to_bytes(4, "little").hex() * 2 not in text
