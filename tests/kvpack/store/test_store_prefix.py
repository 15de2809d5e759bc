"""The keyed prefix chain: equal prefixes give equal links everywhere, anything else others."""

from __future__ import annotations

import dataclasses
import hmac
import os
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from store_kit import HEADER, KEY, import_path, token_ids

from kvpack.errors import LimitError
from kvpack.keys import EpochKey
from kvpack.prefix import PrefixScope

SCOPE = PrefixScope(KEY, HEADER.identity_digest, HEADER.layout_digest)
IDS = token_ids(600)


def test_one_link_for_each_whole_block_and_one_for_nothing() -> None:
    assert len(SCOPE.links(())) == 1
    assert len(SCOPE.links(IDS[:255])) == 1
    assert len(SCOPE.links(IDS[:256])) == 2
    assert len(SCOPE.links(IDS)) == 3
    assert SCOPE.links(IDS[:256]) == SCOPE.links(IDS)[:2]


@given(st.integers(0, 599), st.integers(1, 49_999))
def test_a_changed_token_changes_every_link_after_it_and_none_before(place: int, by: int) -> None:
    changed = list(IDS)
    changed[place] = (changed[place] + by) % 50_000
    pairs = zip(SCOPE.links(IDS), SCOPE.links(changed), strict=True)
    for number, (ours, theirs) in enumerate(pairs):
        assert (ours == theirs) == (number * 256 <= place)


def test_a_token_at_another_place_is_another_prefix() -> None:
    assert SCOPE.links([1, 2] * 128)[1] != SCOPE.links([2, 1] * 128)[1]
    assert SCOPE.links([0] * 256)[1] != SCOPE.links([0] * 512)[2]


def test_key_tenant_epoch_identity_and_layout_each_change_every_link() -> None:
    root = bytes(range(32))
    others = [
        dataclasses.replace(SCOPE, key=EpochKey("acme", 1, bytes(32))),
        dataclasses.replace(SCOPE, key=EpochKey("other", 1, root)),
        dataclasses.replace(SCOPE, key=EpochKey("acme", 2, root)),
        dataclasses.replace(SCOPE, identity_digest=bytes(32)),
        dataclasses.replace(SCOPE, layout_digest=bytes(32)),
    ]
    seen = set(SCOPE.links(IDS))
    for other in others:
        links = set(other.links(IDS))
        assert not links & seen
        seen |= links


def test_a_tail_names_its_place_and_its_tokens() -> None:
    first, second, _ = SCOPE.links(IDS)
    tails = {
        SCOPE.tail(link, ids)
        for link in (first, second)
        for ids in ((), (0,), (0, 0), (1,), (1, 2), (2, 1))
    }
    assert len(tails) == 12
    # Nor can a tail be taken for a link, whatever the tokens.
    assert SCOPE.tail(first, IDS[:255]) not in SCOPE.links(IDS)


def test_ids_outside_their_caps_are_refused() -> None:
    for ids in ([-1], [1 << 31], [0] * 256 + [1 << 40]):
        with pytest.raises(LimitError):
            SCOPE.links(ids)
    with pytest.raises(LimitError):
        SCOPE.tail(bytes(32), [0] * 256)
    with pytest.raises(LimitError):
        PrefixScope(KEY, bytes(31), bytes(32))


_CHILD = """
from test_store_prefix import IDS, SCOPE
print(SCOPE.links(IDS)[-1].hex())
"""


def test_other_processes_hash_seeds_and_locales_compute_the_same() -> None:
    here = Path(__file__).parent
    for seed, locale in (("0", "C"), ("12345", "C.UTF-8")):
        environment = {
            **os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale,
            "PYTHONPATH": import_path(here, here.parents[2]),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", _CHILD], env=environment, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == SCOPE.links(IDS)[-1].hex()


def test_a_link_is_what_the_specification_says() -> None:
    """Computed here from docs/spec/store-v1.md alone. A change would empty every cache."""
    salt = b"kvpack/v1" + b"\x04\x00acme" + b"\x01\x00\x00\x00"
    extracted = hmac.digest(salt, bytes(range(32)), "sha256")
    key = hmac.digest(extracted, b"kvpack/v1/prefix\0\x01", "sha256")
    digests = HEADER.identity_digest + HEADER.layout_digest
    link = blake3(b"r" + b"\x04\x00acme" + digests, key=key).digest()
    for first in (0, 256):
        ids = b"".join(i.to_bytes(4, "little") for i in IDS[first : first + 256])
        link = blake3(b"b" + link + ids, key=key).digest()
    rest = b"".join(i.to_bytes(4, "little") for i in IDS[512:])
    tail = blake3(b"t" + link + (88).to_bytes(2, "little") + rest, key=key).digest()
    assert SCOPE.links(IDS)[-1] == link
    assert SCOPE.tail(link, IDS[512:]) == tail
