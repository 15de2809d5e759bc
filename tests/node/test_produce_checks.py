"""What a producer's rows are compared with, tried on rows that are wrong in each known way.

The wrong rows are those of the reference itself, told to make the mistake: no torch is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest

from engine import tiny_model_files
from engine.described import describe_folder
from engine.oracle import build_oracle, decode_safetensors
from engine.oracle.weights import TEXT_PREFIXES
from kvpack.layout import CacheLayout, Encoding, LayerKind
from kvpack.snapshot import Tile
from node.errors import ProducerCheckError
from node.produce import checks, enrollment, reference
from node.produce.checks import Rows

ARCHITECTURES = ("muse_glimmer", "cohere2")
WINDOW = 20


@functools.cache
def folder_files(arch):
    return tiny_model_files(arch, seed=4, window=WINDOW, layers=4)


@pytest.fixture(params=ARCHITECTURES)
def arch(request):
    return request.param


@pytest.fixture
def described(tmp_path, arch):
    for name, data in folder_files(arch).items():
        (tmp_path / name).write_bytes(data)
    return describe_folder(tmp_path)


@functools.cache
def tensors(arch):
    return decode_safetensors(folder_files(arch)["model.safetensors"])


def text_name(name):
    for prefix in (*TEXT_PREFIXES, "model."):
        name = name.removeprefix(prefix)
    return name


def weights(arch, wanted, table):
    """As a network reads the files: by names of the text network, few rows of long tables."""
    found = {text_name(name): one for name, one in tensors(arch).items() if wanted(text_name(name))}
    return {
        name: one[list(table)] if name in ("embed_tokens.weight", "lm_head.weight") else one
        for name, one in found.items()
    }


class Made:
    """A generation whose rows the reference computes, as they are or with a mistake in them."""

    def __init__(self, session, layout, spoil):
        self.session, self.layout, self.spoil = session, layout, spoil

    def prefill(self, token_ids):
        self.session.prefill(token_ids)

    def read_tiles(self, specs):
        return [Tile(spec, self.tile(spec)) for spec in specs]

    def tile(self, spec):
        parts, dtype = [], "<f4" if self.layout.encoding is Encoding.F32LE else "<f2"
        for layer in spec.layers:
            keys, values = self.session.rows(layer, 0, self.session.position)
            rows = self.spoil(layer, self.layout, Rows(0, keys, values))
            part = slice(spec.first_position, spec.end_position)
            parts += [
                rows.keys[part].astype(dtype).tobytes(),
                rows.values[part].astype(dtype).tobytes(),
            ]
        return b"".join(parts)


def right(layer, layout, rows):
    return rows


class Backend:
    """What the reference computes in the place of a backend; ``change`` is of its model."""

    def __init__(self, arch, described, spoil=right, change=lambda decoder: decoder):
        self.arch, self.described, self.spoil, self.change = arch, described, spoil, change

    def new_generation(self):
        model = build_oracle(dict(self.described.fields), tensors(self.arch))
        return Made(self.session(model), self.described.layout, self.spoil)

    def part(self, layers, table):
        model = build_oracle(dict(self.described.fields), tensors(self.arch))
        embedding = dataclasses.replace(
            model.decoder.embedding, table=model.decoder.embedding.table[list(table)]
        )
        decoder = dataclasses.replace(model.decoder, embedding=embedding)
        model = dataclasses.replace(model, decoder=decoder)
        layout = CacheLayout(self.described.layout.layers[:layers], Encoding.F32LE, 1 << 17)
        return lambda: Made(self.session(model), layout, self.spoil)

    def session(self, model):
        return dataclasses.replace(model, decoder=self.change(model.decoder)).new_session()


_EXPECTED = {}


def outcome(arch, described, **mistake):
    probe = reference.Probe.of(described.layout, described.vocab_size)
    if arch not in _EXPECTED:
        reading = functools.partial(weights, arch)
        _EXPECTED[arch] = reference.reference_rows(described, reading, probe)
    expected = _EXPECTED[arch]
    return enrollment.compare(
        described.layout, expected, probe, Backend(arch, described, **mistake)
    )


def refusal(arch, described, **mistake):
    with pytest.raises(ProducerCheckError) as refused:
        outcome(arch, described, **mistake)
    return str(refused.value)


def each_attention(change):
    """A decoder with ``change`` of every layer's attention."""

    def changed(decoder):
        blocks = [dataclasses.replace(b, attention=change(b.attention)) for b in decoder.blocks]
        return dataclasses.replace(decoder, blocks=tuple(blocks))

    return changed


def words(layout):
    own = layout.layers[0].rope.interleaved
    return ("interleaved", "half-split") if own else ("half-split", "interleaved")


def test_right_rows_pass(arch, described):
    apart, share = outcome(arch, described)
    assert apart < 1e-3 and share < 1e-3


def test_pairs_of_the_other_kind_are_refused_by_name(arch, described):
    def other_pairs(attention):
        if attention.rope is None:
            return attention
        rope = dataclasses.replace(attention.rope, interleaved=not attention.rope.interleaved)
        return dataclasses.replace(attention, rope=rope)

    expected, found = words(described.layout)
    said = refusal(arch, described, change=each_attention(other_pairs))
    assert said == f"layers[0].keys: rope layout: expected {expected}, found {found}"


def test_elements_in_the_other_order_are_refused_by_name(arch, described):
    def permuted(layer, layout, rows):
        rope = layout.layers[layer].rope
        if rope is None:
            return rows
        keys = checks.reordered(rows.keys, rope, interleaved=rope.interleaved)
        return Rows(0, keys, rows.values)

    expected, found = words(described.layout)
    said = refusal(arch, described, spoil=permuted)
    assert said == f"layers[0].keys: rope layout: expected {expected}, found {found}"


@pytest.mark.parametrize("origin", [-1, 1])
def test_positions_from_another_origin_are_refused(arch, described, origin):
    def shifted(layer, layout, rows):
        rope = layout.layers[layer].rope
        if rope is None:
            return rows
        by = np.full(len(rows.keys), float(origin))
        keys = checks.turned(rows.keys, by, rope, interleaved=rope.interleaved)
        return Rows(0, keys, rows.values)

    said = refusal(arch, described, spoil=shifted)
    assert said == f"layers[0].keys: rope: position of the first token: expected 0, found {origin}"


def test_keys_that_were_not_turned_are_refused(arch, described):
    change = each_attention(lambda attention: dataclasses.replace(attention, rope=None))
    said = refusal(arch, described, change=change)
    assert said == f"layers[0].keys: rope: expected {words(described.layout)[0]}, found none"


def test_a_full_layer_that_turns_its_keys_is_refused(arch, described):
    def turned_too(layer, layout, rows):
        if layout.layers[layer].kind is LayerKind.SWA:
            return rows
        places = np.arange(len(rows.keys), dtype=np.float64)
        keys = checks.turned(rows.keys, places, layout.layers[0].rope, interleaved=False)
        return Rows(0, keys, rows.values)

    said = refusal(arch, described, spoil=turned_too)
    assert said == "layers[3].keys: rope: expected none, found half-split"


def test_values_for_keys_are_refused(arch, described):
    said = refusal(arch, described, spoil=lambda _l, _y, rows: Rows(0, rows.values, rows.keys))
    assert said == "layers[0]: roles: expected keys, then values, found values, then keys"


@pytest.mark.parametrize("width", [WINDOW - 1, WINDOW + 1])
def test_a_window_that_is_off_by_one_is_refused(arch, described, width):
    def other_width(attention):
        return dataclasses.replace(attention, window=attention.window and width)

    said = refusal(arch, described, change=each_attention(other_width))
    assert said == (
        f"layers[0]: window: keys seen: expected {WINDOW}, its own among them, found {width}"
    )


@pytest.mark.parametrize("shift", [-1, 1])
def test_rows_of_a_window_a_position_off_are_refused(arch, described, shift):
    def displaced(layer, layout, rows):
        # The short prompt is right: only what a full window hands out is off.
        if layout.layers[layer].window_tokens is None or len(rows.keys) <= WINDOW:
            return rows
        return Rows(0, np.roll(rows.keys, -shift, 0), np.roll(rows.values, -shift, 0))

    said = refusal(arch, described, spoil=displaced)
    first, end = reference.BEYOND_TOKENS, reference.BEYOND_TOKENS + WINDOW
    found = f"rows [{first + shift}, {end + shift})"
    assert said == f"layers[0]: window: expected rows [{first}, {end}), found {found}"


def test_what_is_no_known_mistake_is_refused_by_its_size(arch, described):
    def noisy(layer, layout, rows):
        noise = np.random.default_rng(layer).normal(size=rows.values.shape)
        return Rows(0, rows.keys, (rows.values * (1 + 0.2 * noise)).astype(np.float32))

    said = refusal(arch, described, spoil=noisy)
    assert re.match(
        r"layers\[0\]\.values: expected rows within 0\.02 of the reference's, found 0\.", said
    )


def test_values_that_are_no_numbers_are_refused(arch, described):
    def broken(layer, layout, rows):
        values = rows.values.copy()
        values[-1] = np.nan
        return Rows(0, rows.keys, values)

    assert "found inf" in refusal(arch, described, spoil=broken)
