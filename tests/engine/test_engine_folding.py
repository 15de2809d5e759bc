"""What is computed once instead of in every layer changes no bit, and is really left out."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, run_calls, tokens
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from models_support import CASES as OTHER_CASES
from models_support import network_of

import engine
from engine import ARCHITECTURES, Logits, Model, folding, mlxlm
from engine.call_logits import CallLogits
from engine.folding import Angles, OffsetNorm, QuickAttention, QuickNorm, SharedRope, fold
from kvpack.layout import Encoding

W = 8
Load = Callable[[ModelCase], Model]
Folder = Callable[[ModelCase], Path]
CASES = [
    *(ModelCase(arch) for arch in ARCHITECTURES),
    ModelCase("muse_glimmer", "bfloat16", TOKEN),
    ModelCase("cohere2", "bfloat16", HEAD),
    *OTHER_CASES,
]


@pytest.fixture
def unfolded(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A model whose network is as mlx-lm made it."""

    def load_case(case: ModelCase) -> Model:
        with monkeypatch.context() as patch:
            patch.setattr(mlxlm, "fold", lambda *_, **__: None)
            return engine.load_model(model_folder(case), plane_layout=case.layout)

    return load_case


def said(model: Model) -> tuple[list[bytes], tuple]:
    """Logits and rows of a chunk that wraps, of single steps across the wrap, and of a block."""
    session = model.new_generation()
    run_calls(session, tokens(W + 3), [W - 3, 6])
    out = [logits.data for logits in greedy(session, 65, 2 * W)]
    out += [logits.data for logits in session.block(tokens(5, salt=1))]
    out += [logits.data for logits in greedy(session, 66, 2)]
    return out, session.snapshot(tokens(session.position)).tiles


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_folded_network_has_the_bits_of_the_one_it_was(
    case: ModelCase, load: Load, unfolded: Load
) -> None:
    assert said(load(case)) == said(unfolded(case))


def operations(model: Model) -> int:
    session = model.new_generation()
    run_calls(session, tokens(W + 3), [W + 3])
    graph = io.StringIO()
    mx.export_to_dot(graph, model.forward(mx.array([[1]]), session._caches))
    return len(re.findall(r'label ?= ?"[A-Z]', graph.getvalue()))


@pytest.mark.parametrize(("arch", "share"), [("muse_glimmer", 0.65), ("cohere2", 0.96)])
def test_a_step_has_fewer_operations(arch: str, share: float, load: Load, unfolded: Load) -> None:
    case = ModelCase(arch)
    assert operations(load(case)) < share * operations(unfolded(case))


def kinds(model: Model) -> list[type]:
    """Types of everything that the modules of a network hold."""
    held = [one for module in network_of(model).modules() for one in vars(module).values()]
    inside = [one._own for one in held if isinstance(one, QuickAttention)]
    return [type(one) for one in (*held, *(rope for own in inside for rope in vars(own).values()))]


def test_every_norm_and_every_plain_rope_is_replaced(
    load: Load, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kinds(load(ModelCase("muse_glimmer")))
    assert found.count(QuickNorm) == 4 * 4 + 1, "four in each of four layers, and the last"
    assert found.count(QuickAttention) == 4
    assert found.count(SharedRope) == 3, "the fourth layer does not turn"
    monkeypatch.setattr(folding, "_same_norms", lambda: False)
    found = kinds(engine.load_model(model_folder(ModelCase("muse_glimmer"))))
    assert found.count(OffsetNorm) == 4 * 4
    assert found.count(QuickNorm) == found.count(QuickAttention) == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("dims", [1, 31, 192, 1000])
def test_a_quick_norm_is_the_one_it_stands_for(dtype: mx.Dtype, dims: int) -> None:
    """To the bit, from values that vanish to such as overflow; and several tokens as before."""
    for row in range(12):
        own = RMSNorm(dims, 1e-5)
        own.weight = mx.random.normal((dims,), key=mx.random.key(row)).astype(dtype)
        x = mx.random.normal((1, 1, dims), key=mx.random.key(50 + row)) * 10.0 ** (row - 6)
        for given in (x.astype(dtype), mx.repeat(x, 3, axis=1).astype(dtype)):
            left, right = own(given), QuickNorm(own)(given)
            assert left.dtype == right.dtype
            assert mx.array_equal(left.view(mx.uint8), right.view(mx.uint8))
        assert mx.array_equal(own(x), QuickNorm(own)(x)), "a weight of another dtype"


def test_norms_of_a_compiler_that_rounds_once_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As some do with a product and the sum that it stands in."""
    plain = folding._COMPILED_SCALED

    def contracted(x, total, share, eps, scale):  # type: ignore[no-untyped-def]
        wide = np.array(total).astype(np.float64) * np.array(share) + np.array(eps)
        # The sum is given as it is: times one, plus nothing.
        one, none = mx.ones_like(share), mx.zeros_like(eps)
        return plain(x, mx.array(wide.astype(np.float32)), one, none, scale)

    assert folding._same_norms()
    monkeypatch.setattr(folding, "_COMPILED_SCALED", contracted)
    assert not folding._same_norms()


def test_without_a_compiler_norms_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(pairs: object) -> bool:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(folding, "_all_same", refuses)
    assert not folding._same_norms()


def test_angles_that_differ_by_a_bit_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another MLX may build RoPE otherwise; then the model keeps its own."""

    class Attention(mlxlm.CenteredRMSNorm):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(4, 1e-5)
            self.rope = RoPE(16)

    taken, kept = Attention(), Attention()
    fold(taken, (), mx.float16, no_kernels=True)
    assert type(taken.rope) is SharedRope
    plain = Angles.at

    def other(self: Angles, position: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        cosine, sine = plain(self, position, dtype)
        return (cosine.view(mx.uint16) ^ 1).view(dtype), sine

    monkeypatch.setattr(folding.Angles, "at", other)
    fold(kept, (), mx.float16, no_kernels=True)
    assert type(kept.rope) is RoPE


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("interleaved", [False, True])
def test_shared_angles_turn_as_each_layer_would(dtype: mx.Dtype, interleaved: bool) -> None:
    """Base, scale and position as they occur, alternating as two sessions would make them."""
    x = mx.random.normal((1, 3, 1, 32), key=mx.random.key(5)).astype(dtype)
    for base, scale in ((1e4, 1.0), (5e5, 1.0), (1e6, 0.125)):
        own = RoPE(32, interleaved, base, scale)
        shared = SharedRope(own, Angles(own))
        for position in (0, 7, 7, 63, 131_071, 63, *range(1000, 1040)):
            left, right = own(x, offset=position), shared(x, offset=position)
            assert mx.array_equal(left.view(mx.uint8), right.view(mx.uint8))
    chunk = mx.random.normal((1, 3, 5, 32), key=mx.random.key(5)).astype(dtype)
    assert mx.array_equal(own(chunk, offset=9), shared(chunk, offset=9))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_greedy_token_is_the_one_that_the_host_would_take(dtype: mx.Dtype) -> None:
    """The lowest id among equals, zeros of both signs being equal."""
    rows = mx.random.normal((1, 7, 301), key=mx.random.key(3))
    ties = mx.array([[0.0, -0.0, 0.0], [-0.0, 0.0, -1.0], [2.0, 3.0, 3.0]])[None]
    for values in (rows.astype(dtype), (mx.round(rows)).astype(dtype), ties.astype(dtype)):
        call = CallLogits(values)
        mx.eval(call.arrays())
        for logits in call.split():
            assert logits.argmax() == Logits(logits.encoding, logits.data).argmax()


def test_logits_are_a_value_whenever_they_are_read(load: Load) -> None:
    """Read late, by several threads, while the session goes on: the bytes of an early reader."""
    early, late = (load(ModelCase()).new_generation() for _ in range(2))
    kept: list[Logits] = []
    wanted = []
    for token in tokens(3 * W):
        wanted.append(early.step(token).data)
        kept.append(late.step(token))
    kept += late.block(tokens(3))
    wanted += [logits.data for logits in early.block(tokens(3))]
    read: list[list[bytes]] = []
    threads = [
        threading.Thread(target=lambda: read.append([logits.data for logits in kept]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert read == [wanted, wanted]
    assert kept[0] == Logits(kept[0].encoding, wanted[0])
    assert hash(kept[0]) == hash(Logits(kept[0].encoding, wanted[0]))
    assert kept[0] != kept[1] and kept[0] != wanted[0]
    assert Logits(Encoding.F16LE, np.zeros(4, "<f2").tobytes()) != Logits(Encoding.BF16LE, bytes(8))
