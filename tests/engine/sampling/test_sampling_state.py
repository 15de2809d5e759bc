"""The sampler as a value: its stream, its record, and going on after a restore."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logits import Logits
from engine.sampling import SamplingParameters
from engine.sampling_random import RandomStream
from engine.sampling_state import SamplerState
from engine.stream import TextStream
from engine.stream_state import DecodingState
from kvpack.errors import FormatError, KvpackError, LimitError, VersionError
from kvpack.layout import Encoding

RICH = SamplingParameters(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    penalty_window_tokens=6,
    logit_bias=((3, -100.0), (7, 1.5)),
)


def step_logits(step: int) -> Logits:
    values = np.sin(np.arange(64, dtype=np.float32) * (step % 17 + 1)) * 3
    return Logits(Encoding.F16LE, values.astype("<f2").tobytes())


def run(state: SamplerState, first: int, last: int) -> tuple[list[int], SamplerState]:
    chosen = []
    for step in range(first, last):
        token, state = state.choose(step_logits(step))
        chosen.append(token)
    return chosen, state


def test_the_stream_is_what_its_definition_says() -> None:
    key = bytes(range(32))
    stream = RandomStream(key, counter=5)
    for index in range(5, 9):
        value, stream = stream.uniform()
        digest = blake3(b"uniform\0" + index.to_bytes(8, "little"), key=key).digest()
        assert value == (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)
        assert stream.counter == index + 1


def test_a_seed_gives_these_numbers_for_ever() -> None:
    """Old packs hold streams: a changed definition would continue them differently."""
    stream = RandomStream.from_seed(42)
    numbers = []
    for _ in range(3):
        value, stream = stream.uniform()
        numbers.append(value)

    assert numbers == [0.7291810514602444, 0.9710183214555849, 0.6553192895173062]
    assert RandomStream.from_seed(43) != RandomStream.from_seed(42)


def test_fresh_streams_differ_and_seeds_are_bounded() -> None:
    assert RandomStream.fresh() != RandomStream.fresh()
    for seed in (-1, 1 << 64, True, 1.5):
        with pytest.raises(LimitError, match=r"sampling\.seed"):
            RandomStream.from_seed(seed)  # type: ignore[arg-type]
    with pytest.raises(LimitError, match=r"random\.key"):
        RandomStream(b"short")


@pytest.mark.parametrize("cut", [0, 1, 5, 6, 7, 39])
def test_restored_in_mid_stream_it_continues_as_if_uninterrupted(cut: int) -> None:
    begin = SamplerState.begin(RICH, seed=9, prompt=range(20))
    whole, end = run(begin, 0, 40)
    head, middle = run(begin, 0, cut)
    tail, restored_end = run(SamplerState.from_bytes(middle.to_bytes()), cut, 40)

    assert head + tail == whole
    assert restored_end == end
    assert restored_end.to_bytes() == end.to_bytes()
    # The stream matters: one number further on, it is another text.
    other = dataclasses.replace(middle, stream=middle.stream.uniform()[1])
    assert run(other, cut, 40)[0] != tail or cut == 39


def test_history_is_a_window_and_absent_without_penalties() -> None:
    state = SamplerState.begin(RICH, seed=1, prompt=[1, 2, 3, 4, 5, 6, 7, 8])
    assert state.history == (3, 4, 5, 6, 7, 8)
    assert state.observe((9,)).history == (4, 5, 6, 7, 8, 9)
    assert state.observe(range(100, 120)).history == tuple(range(114, 120))
    plain = SamplerState.begin(SamplingParameters(), seed=1, prompt=[1, 2])
    assert plain.history == ()


def test_penalties_look_at_the_window_only() -> None:
    parameters = SamplingParameters(temperature=0.0, presence_penalty=9.0, penalty_window_tokens=2)
    level = Logits(Encoding.F32LE, np.array([3, 2, 1, 0], "<f4").tobytes())
    state = SamplerState.begin(parameters, seed=0)
    chosen = []
    for _ in range(6):
        token, state = state.choose(level)
        chosen.append(token)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_greedy_takes_no_numbers_and_is_the_logits_own_argmax() -> None:
    state = SamplerState.greedy()
    for step in range(20):
        token, after = state.choose(step_logits(step))
        assert token == step_logits(step).argmax()
        assert after == state


def test_choosing_leaves_the_state_it_began_with() -> None:
    state = SamplerState.begin(RICH, seed=4, prompt=[5])
    before = state.to_bytes()
    assert run(state, 0, 10) == run(state, 0, 10)
    assert state.to_bytes() == before


def test_reprs_show_neither_text_nor_keys() -> None:
    state = DecodingState(SamplerState.begin(RICH, seed=4, prompt=[51]), TextStream(("secret",)))
    shown = repr(state) + repr(state.sampler.stream) + repr(state.text)
    for secret in ("secret", "51", "-100", state.sampler.stream.key.hex()[:8], "key"):
        assert secret not in shown


def record() -> bytes:
    sampler = SamplerState.begin(RICH, seed=4, prompt=[1, 2, 3])
    return DecodingState(sampler, TextStream(("stop", "é"), b"\xf0\x9f", "st")).to_bytes()


def test_records_round_trip() -> None:
    assert DecodingState.from_bytes(record()).to_bytes() == record()
    assert DecodingState.from_bytes(DecodingState().to_bytes()) == DecodingState()


def test_every_cut_and_every_added_byte_is_refused() -> None:
    data = record()
    for size in range(len(data)):
        with pytest.raises(FormatError):
            DecodingState.from_bytes(data[:size])
    with pytest.raises(FormatError, match="1 more bytes"):
        DecodingState.from_bytes(data + b"\0")


def test_other_kinds_and_versions_are_told_apart() -> None:
    data = record()
    with pytest.raises(FormatError, match=r"decoding\.magic"):
        DecodingState.from_bytes(SamplerState.greedy().to_bytes())
    with pytest.raises(VersionError, match=r"decoding\.version: expected 1, found 2"):
        DecodingState.from_bytes(data[:4] + b"\2" + data[5:])


def test_a_declared_length_is_not_believed() -> None:
    data = SamplerState.greedy().to_bytes()
    for size in (4097, 1 << 31, (1 << 32) - 1):
        with pytest.raises(LimitError, match="history"):
            SamplerState.from_bytes(data[:-4] + size.to_bytes(4, "little"))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(record()) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_another_value_or_an_error(offset: int, change: int) -> None:
    data = bytearray(record())
    data[offset] ^= change
    try:
        state = DecodingState.from_bytes(bytes(data))
    except KvpackError:
        return
    assert state.to_bytes() == bytes(data)
    assert state != DecodingState.from_bytes(record())


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_give_a_value_or_an_error(data: bytes) -> None:
    for prefix in (b"", b"kvDS\x01", b"kvSA\x01", b"kvTX\x01"):
        for kind in (DecodingState, SamplerState, TextStream):
            try:
                kind.from_bytes(prefix + data)
            except KvpackError:
                continue
