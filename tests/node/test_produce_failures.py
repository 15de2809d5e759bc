"""Calls of another backend that fail: an error with a name, and a session that is as before it.

The network here keeps rows in a list, so that it can fail at any place of a call; what torch itself
says when memory is short is in the slow suite (``tests/e2e/test_produce_failures_torch.py``).
"""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from types import SimpleNamespace

import pytest
from node_support import events, move, prompt, run

from engine.errors import ModelFolderError
from kvpack.identity import CallSchedule
from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout
from node.errors import BackendFailedError, MemoryLackingError, PeerAnswerError
from node.produce.failures import guarded, named
from node.produce.generation import TorchGeneration
from node.produce.shapes import require_one_shape

ROPE = RopeLayout(0x40DF400000000000, 16, interleaved=False)
SLIDING = LayerLayout(LayerKind.SWA, 16, 2, 16, 16, ROPE)
FULL = LayerLayout(LayerKind.FULL, None, 2, 16, 16)
LAYOUT = CacheLayout((SLIDING, SLIDING, SLIDING, FULL), Encoding.F16LE, 1 << 17)

CPU = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of "
    "which 1.06 GiB is free. Process 31 has 138.66 GiB memory in use."
)
PINNED = "CUDA error: out of memory\nCUDA kernel errors might be reported asynchronously"


class OutOfMemoryError(RuntimeError):
    """As torch calls CUDA's."""


class Network:
    """Fails where it is told to."""

    layout = LAYOUT
    device = SimpleNamespace(type="cpu")

    def __init__(self):
        self.fail: dict[str, BaseException] = {}
        self.given_up = self.tidied = 0

    def _reach(self, place):
        if place in self.fail:
            raise self.fail.pop(place)

    def new_rows(self):
        self._reach("rows")
        rows = SimpleNamespace(position=0, told=[])
        rows.end = lambda count: setattr(rows, "position", rows.position + count)
        return rows

    def compute(self, token_ids, rows):
        rows.told[rows.position :] = token_ids
        self._reach("compute")
        return sum(rows.told)

    def logits(self, activations):
        self._reach("logits")
        return bytes(8)

    def finish(self):
        self._reach("finish")

    def give_up(self, rows):
        self.given_up += 1

    def tidy(self):
        self.tidied += 1


@pytest.fixture
def network():
    return Network()


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(CPU), " (4398046511104 bytes more were asked for)"),
        (OutOfMemoryError(CUDA), " (2.00 GiB more were asked for)"),
        (RuntimeError(PINNED), ""),
        (MemoryError(), ""),
    ],
)
def test_too_little_memory_says_what_was_asked_for(error, asked):
    found = named(error, "a call of 512 tokens at position 1,024")
    assert isinstance(found, MemoryLackingError) and found.reason == "out_of_memory"
    said = f"a call of 512 tokens at position 1,024: out of memory{asked}, and changed nothing"
    assert str(found) == said


def test_what_a_backend_says_itself_is_not_passed_on():
    found = named(ValueError("what somebody wrote"), "a call of 1 token at position 7")
    assert isinstance(found, BackendFailedError) and found.reason == "backend_failed"
    said = "a call of 1 token at position 7: failed, and changed nothing: ValueError at "
    assert str(found).startswith(said) and "somebody" not in str(found)


def test_an_error_that_has_a_name_keeps_it():
    error = ModelFolderError("x")
    assert named(error, "y") is error


@pytest.mark.parametrize("place", ["compute", "logits"])
@pytest.mark.parametrize("error", [RuntimeError(CPU), RuntimeError("device-side assert")])
def test_a_step_that_fails_is_made_again(network, place, error):
    generation, twin = TorchGeneration(network, 50), TorchGeneration(Network(), 50)
    for one in (generation, twin):
        one.prefill([1, 2, 3])
    network.fail[place] = error
    kind = MemoryLackingError if "allocate" in str(error) else BackendFailedError
    with pytest.raises(kind, match=r"a call of 1 token at position 3: "):
        generation.step(4)
    assert generation.position == 3 and network.given_up == 1
    assert generation.schedule == CallSchedule().after_call(3)
    for one in (generation, twin):
        one.step(4)
    assert generation.position == twin.position == 4
    assert generation.schedule == twin.schedule


@pytest.mark.parametrize("place", ["compute", "finish"])
def test_a_prefill_that_fails_is_made_again(network, place):
    generation = TorchGeneration(network, 50)
    generation.prefill([1] * 10)
    network.fail[place] = OutOfMemoryError(CUDA)
    with pytest.raises(MemoryLackingError, match=r"a call of 512 tokens at position 10: "):
        generation.prefill([2] * 512)
    assert generation.position == 10 and network.given_up == 1
    generation.prefill([2] * 512)
    assert generation.position == 522


def test_a_session_that_does_not_fit_is_none(network):
    network.fail["rows"] = RuntimeError(CPU)
    with pytest.raises(MemoryLackingError, match="a new session's rows: out of memory"):
        TorchGeneration(network, 50)
    assert network.tidied == 1
    assert TorchGeneration(network, 50).position == 0


def test_nothing_of_a_failed_call_is_held_by_its_error():
    class Big:
        pass

    seen = []

    def work():
        big = Big()
        seen.append(weakref.ref(big))
        raise RuntimeError(CPU)

    def give_up():
        gc.collect()
        seen.append(seen[0]() is None)

    with pytest.raises(MemoryLackingError) as refused:
        guarded(work, "a call", give_up)
    # When memory is given back, and in whatever the caller keeps of the error.
    assert seen[1] and refused.value.__context__ is None


def changed(layer, **fields):
    layers = list(LAYOUT.layers)
    layers[layer] = dataclasses.replace(layers[layer], **fields)
    return dataclasses.replace(LAYOUT, layers=tuple(layers))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (changed(1, rope=None), r"layers\[1\]\.rope: expected theta 32000 over 16 elements, "
         r"half-split, as layers\[0\] has .*, found none"),
        (changed(2, rope=dataclasses.replace(ROPE, theta_bits=0x40C3880000000000)),
         r"layers\[2\]\.rope: expected theta 32000 .*, found theta 10000 over 16 elements, half-"),
        (changed(2, window_tokens=8), r"layers\[2\]\.window_tokens: expected 16, .*, found 8"),
        (changed(1, kv_heads=4), r"layers\[1\]\.kv_heads: expected 2, .*, found 4"),
        (changed(3, value_dim=8), r"layers\[3\]\.value_dim: expected 16, as its keys have, "),
    ],
)  # fmt: skip
def test_layers_of_a_kind_that_differ_are_refused_by_name(layout, said):
    with pytest.raises(ModelFolderError) as refused:
        require_one_shape(layout)
    assert re.match(said, str(refused.value)), refused.value


def test_layers_of_two_kinds_may_differ():
    require_one_shape(LAYOUT)


async def reason(work) -> str:
    with pytest.raises(PeerAnswerError) as refused:
        await work
    return refused.value.peer_reason


def test_a_session_that_could_not_be_made_leaves_its_name_free(world):
    async def work():
        async with world.node("source") as (node, client):
            model = node.sessions.engine.model
            failing = SimpleNamespace(new_generation=out_of_memory, vocab_size=model.vocab_size)
            node.sessions.engine.model = failing
            assert await reason(client.open("s")) == "out_of_memory"
            node.sessions.engine.model = model
            session = await client.append(await client.open("s"), prompt(20))
            assert len(await events(client, session, 20, 2)) == 2

    run(work())


def out_of_memory():
    raise MemoryLackingError("a new session's rows: out of memory")


def test_a_boundary_call_that_fails_ends_the_move_at_both_ends_by_name(world):
    async def work():
        async with world.pair() as (source, giving, target, taking):
            session = await giving.open("s")
            live = await source.sessions.find("s")
            step, live.decode_next = live.decode_next, fails
            words = await refused_move(move(giving, target, session, prompt(20)))
            assert "a call of 1 token" in words and "stays on this node" in words
            assert not world.spool("target")
            live.decode_next = step
            assert (await giving.get("s")).position == 19
            moved = await move(giving, target, await giving.get("s"))
            assert moved.continuation_verdict == "exact"
            assert len(await events(taking, await taking.get("s"), 20, 2)) == 2

    run(work())


def fails():
    raise BackendFailedError("a call of 1 token at position 19: failed")


async def refused_move(work) -> str:
    with pytest.raises(PeerAnswerError) as refused:
        await work
    assert refused.value.peer_reason == "transfer_failed"
    assert refused.value.hints["kvpack-cause"] == "backend_failed"
    return str(refused.value)
