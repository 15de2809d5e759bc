"""Whatever the calls and cuts: a cut has every row once, and no block is sealed twice."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from store_kit import IDENTITY, Session, layout, token_ids

from kvpack.bundle import encode_header
from kvpack.header import Header
from kvpack.manifest import seal_manifest
from kvpack.snapshot import check_coverage
from kvpack.store.grid import SealedGrid

IDS = token_ids(3000)


@given(
    window=st.sampled_from([1, 8, 255, 256, 257, 300, 511, 512, 700, 2048]),
    calls=st.lists(st.integers(1, 600), min_size=1, max_size=6),
    cuts=st.sets(st.integers(0, 5)),
)
def test_every_cut_is_whole_and_every_block_is_sealed_once(
    window: int, calls: list[int], cuts: set[int]
) -> None:
    header = Header.of(dataclasses.replace(IDENTITY, layout=layout(window)), 1)
    session = Session(IDS, header=header)
    sealed: set[bytes] = set()
    position = 0
    for number, call in enumerate(calls):
        position = min(position + call, len(IDS))
        if position == session.position:
            break
        for chunk in session.grow(position):
            assert chunk.reference.token_count == 256
            assert chunk.reference.seal_id not in sealed
            sealed.add(chunk.reference.seal_id)
        if number in cuts:
            _, manifest = session.cut()
            specs = [ref.used_spec() for ref in manifest.references if ref.has_rows]
            check_coverage(header.layout, position, specs)
            seal_manifest(session.key, encode_header(header), manifest, in_store=True)


def test_a_restored_session_goes_on_with_the_blocks_of_its_cut() -> None:
    session = Session(IDS)
    for edge in (512, 1024, 1300):
        session.grow(edge)
    _, manifest = session.cut()
    again = SealedGrid(session.header.layout, manifest.references)
    here, there = session.grid.cut(1300), again.cut(1300)
    assert set(there.references) == set(here.references)
    assert there.to_seal == here.to_seal
