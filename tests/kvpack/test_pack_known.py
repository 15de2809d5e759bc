"""A manifest whose references are known: compared as bytes, with the verdict of reading all."""

from __future__ import annotations

import dataclasses
import io
import random

import pytest
from pack_kit import KEY, KEYRING, pack

from kvpack.bundle import BundleReader
from kvpack.errors import FormatError, KvpackError
from kvpack.header import decode_header
from kvpack.manifest import (
    KnownReferences,
    check_manifest,
    encode_reference,
    open_manifest,
    seal_manifest,
)
from kvpack.manifest.message import decode_message, encode_message


@pytest.fixture(scope="module")
def whole():
    """A manifest, and the header that it belongs to."""
    reader = BundleReader(io.BytesIO(pack(600)), KEYRING)
    return reader.manifest, reader.index.header_bytes


@pytest.fixture(params=[False, True], ids=["encoded", "and asked"])
def known(request, whole):
    """Makes references known, with and without what the gate asks of each."""
    layout = decode_header(whole[1]).layout if request.param else None
    return lambda references: KnownReferences(references, layout)


def test_known_references_give_the_manifest_that_reading_gives(whole, known, monkeypatch):
    manifest, header = whole
    blob = seal_manifest(KEY, header, manifest)
    read = open_manifest(KEY, header, blob)
    seen = []
    monkeypatch.setattr(
        "kvpack.manifest.message._reference_value",
        lambda message, layers: seen.append(message) or manifest.references[0],
    )
    assert open_manifest(KEY, header, blob, known=known(manifest.references)) == read == manifest
    assert len(seen) == 1, "only the first of them is read"


def test_other_references_than_the_known_ones_are_read(whole, known):
    manifest, header = whole
    references = manifest.references
    blob = seal_manifest(KEY, header, manifest)
    others = [
        references[:1], references[1:], references[:-1], references[1:2], references[::-1],
        (*references, references[0]),
        (dataclasses.replace(references[0], content_id=bytes(32)), *references[1:]),
    ]  # fmt: skip
    for other in others:
        assert open_manifest(KEY, header, blob, known=known(other)) == manifest


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 70])
@pytest.mark.parametrize("kept", [0, 1, 32, 33, 64])
def test_nothing_that_waits_to_be_encoded_is_left_out(whole, count, kept):
    manifest, header = whole
    layout = decode_header(header).layout
    some = [manifest.references[index % len(manifest.references)] for index in range(count)]
    whole_bytes = [encode_reference(reference) for reference in some]
    # Each of them is the first that anything is asked for.
    assert KnownReferences(some, layout).encoded == b"".join(whole_bytes)
    assert KnownReferences(some, layout).tally.epoch == (1 if some else 0)
    assert KnownReferences(some, layout).references == tuple(some)
    cut = KnownReferences(some, layout)
    cut.truncate(kept)
    assert cut.encoded == b"".join(whole_bytes[:kept])
    assert cut.references == tuple(some[:kept])
    twice = len(set(some[:kept])) < len(some[:kept])
    assert cut.tally.distinct is not twice


def test_references_that_were_encoded_before_give_the_same_blob(whole, known):
    manifest, header = whole
    references = known(manifest.references)
    blob = seal_manifest(KEY, header, manifest)
    assert seal_manifest(KEY, header, manifest, known=references) == blob
    references.append(manifest.references[0])
    with pytest.raises(ValueError, match="other references"):
        seal_manifest(KEY, header, manifest, known=references)
    references.truncate(len(manifest.references))
    assert references.references == manifest.references
    assert seal_manifest(KEY, header, manifest, known=references) == blob


def test_every_changed_byte_has_the_same_verdict_with_and_without(whole, known):
    manifest, _ = whole
    data, expected = encode_message(manifest), known(manifest.references)

    def verdict(message, *arguments):
        try:
            return decode_message(message, *arguments)
        except KvpackError as error:
            return type(error), str(error)

    around = len(data) - len(expected.encoded) + 200
    places = {*range(min(around, len(data))), *range(len(data) - 150, len(data))}
    for at in sorted(places):
        changed = data[:at] + bytes((data[at] ^ 0x05,)) + data[at + 1 :]
        assert verdict(changed, expected) == verdict(changed), at
    for end in range(len(data) - 300, len(data)):
        assert verdict(data[:end], expected) == verdict(data[:end]), end
    start = data.index(expected.encoded)
    twice = data[:start] + expected.encoded + data[start:]
    assert verdict(twice, expected) == verdict(twice)


def test_of_references_that_were_asked_as_they_came_none_is_asked_at_the_end(whole, monkeypatch):
    manifest, header = whole
    layout = decode_header(header).layout
    references = KnownReferences(manifest.references, layout)
    blob = seal_manifest(KEY, header, manifest)

    def ask(*_):
        raise AssertionError("asked again")

    for name in ("_check_rows", "_check_place", "_check_parts"):
        monkeypatch.setattr(f"kvpack.manifest.gate.{name}", ask)
    assert open_manifest(KEY, header, blob, known=references) == manifest
    # A resumed stream has sent fewer: what the rest came to is forgotten with it.
    whole_count = len(references)
    references.truncate(whole_count // 2)
    for reference in manifest.references[whole_count // 2 :]:
        references.append(reference)
    assert seal_manifest(KEY, header, manifest, known=references) == blob
    with pytest.raises(AssertionError, match="asked again"):
        open_manifest(KEY, header, blob, known=KnownReferences(manifest.references))


def test_in_any_order_references_have_the_verdict_of_being_asked_at_the_end(whole):
    manifest, header_bytes = whole
    header, draw = decode_header(header_bytes), random.Random(1)

    def verdict(references, known=None):
        try:
            changed = dataclasses.replace(manifest, references=references)
            check_manifest(header, changed, tally=None if known is None else known.tally)
        except KvpackError as error:
            return type(error), str(error)
        return None

    verdicts = set()
    for _ in range(60):
        references = list(manifest.references)
        draw.shuffle(references)
        left_out = draw.choice([0, 0, 1, 2])
        known = KnownReferences(references[left_out:], header.layout)
        found = verdict(known.references, known)
        assert found == verdict(tuple(references[left_out:]))
        verdicts.add(found is None)
    assert verdicts == {False, True}


def test_a_chunk_that_came_twice_is_refused_by_whoever_knew_it(whole):
    manifest, header = whole
    twice = KnownReferences(
        (*manifest.references, manifest.references[0]), decode_header(header).layout
    )
    with pytest.raises(FormatError, match="a second time"):
        dataclasses.replace(manifest, references=twice.references)
