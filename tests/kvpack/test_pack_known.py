"""A manifest whose references are known: compared as bytes, with the verdict of reading all."""

from __future__ import annotations

import dataclasses
import io

import pytest
from pack_kit import KEY, KEYRING, pack

from kvpack.bundle import BundleReader
from kvpack.errors import KvpackError
from kvpack.manifest import KnownReferences, open_manifest, seal_manifest
from kvpack.manifest.message import decode_message, encode_message


@pytest.fixture(scope="module")
def whole():
    """A manifest, and the header that it belongs to."""
    reader = BundleReader(io.BytesIO(pack(600)), KEYRING)
    return reader.manifest, reader.index.header_bytes


def known(references) -> KnownReferences:
    return KnownReferences(references)


def test_known_references_give_the_manifest_that_reading_gives(whole, monkeypatch):
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


def test_other_references_than_the_known_ones_are_read(whole):
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


def test_references_that_were_encoded_before_give_the_same_blob(whole):
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


def test_every_changed_byte_has_the_same_verdict_with_and_without(whole):
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
