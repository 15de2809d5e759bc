"""Products of single tokens through single precision: sooner, and not a bit of them another."""

from __future__ import annotations

import platform
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

import engine
from engine import mlxlm, products
from engine.products import Budget, QuickEmbedding, QuickLinear, QuickProduct, quicken, same_sums

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "models" / "muse-novels-6m"
HALVES = [mx.float16, mx.bfloat16]


pytestmark = pytest.mark.skipif(
    engine.backend.backend_name() != "cpu" or platform.machine() != "x86_64",
    reason="other builds may add in another order: then nothing is replaced",
)


@pytest.fixture
def tried_anew():
    same_sums.cache_clear()
    yield
    same_sums.cache_clear()


class Net(nn.Module):
    def __init__(self, *, bias: bool = False, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width)
        self.up = nn.Linear(width, 2 * width, bias=bias)
        self.down = nn.Linear(2 * width, width, bias=bias)

    def __call__(self, ids):
        return self.embed.as_linear(self.down(self.up(self.embed(ids))))


def net(dtype, **options):
    mx.random.seed(11)
    made = Net(**options)
    made.set_dtype(dtype)
    return made


def words(array):
    return array.view(mx.uint32 if array.dtype == mx.float32 else mx.uint16).tolist()


@pytest.mark.parametrize("dtype", HALVES)
def test_the_pinned_build_adds_alike_so_that_products_are_quick(dtype):
    """If this fails, decoding on a CPU is right and some four times slower."""
    assert same_sums(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (256, 128), (77, 1031), (3001, 63), (129, 4099), (4099, 577)]
)
def test_a_product_has_the_bits_of_the_kernel_for_halves(dtype, shape):
    mx.random.seed(sum(shape))
    for scale in (1e-3, 1.0, 100.0):
        weight = (mx.random.normal(shape) * scale).astype(dtype)
        x = mx.random.normal((1, 1, shape[1])).astype(dtype)
        assert words(QuickProduct(weight)(x)) == words(x @ weight.T)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_network_gives_the_same_bits_for_one_token_and_for_several(dtype):
    plain, quick = net(dtype), net(dtype)
    assert words(plain(mx.array([[7]]))) == words(quick(mx.array([[7]])))
    assert quicken(quick) == 2
    assert type(quick.up) is type(quick.down) is QuickLinear
    assert type(quick.embed) is QuickEmbedding
    for ids in ([[7]], [[299]], [[1, 2]], [list(range(40))]):
        assert words(plain(mx.array(ids))) == words(quick(mx.array(ids)))


def test_only_one_token_of_the_matrix_own_dtype_takes_the_copy():
    linear = QuickLinear(nn.Linear(256, 256, bias=False))
    product = QuickProduct(mx.ones((256, 256), mx.float16))
    assert product.takes(mx.ones((1, 1, 256), mx.float16))
    for other in (
        mx.ones((1, 2, 256), mx.float16), mx.ones((2, 1, 256), mx.float16),
        mx.ones((1, 1, 256), mx.float32), mx.ones((1, 1, 128), mx.float16),
    ):  # fmt: skip
        assert not product.takes(other)
    with pytest.raises(ValueError, match="matmul"):
        linear(mx.ones((1, 1, 255)))


def test_small_ones_those_with_bias_and_single_precision_stay_as_they_are():
    for made in (net(mx.float32), net(mx.float16, bias=True), net(mx.float16, width=64)):
        assert quicken(made) == 0
        assert type(made.up) is type(made.down) is nn.Linear
    assert type(made.embed) is nn.Embedding


def test_without_room_for_all_linear_layers_there_is_none():
    made = net(mx.float16)
    size = (made.up.weight.size + made.down.weight.size) * 4
    assert quicken(made, Budget(size - 1)) == 0
    assert type(made.up) is type(made.down) is nn.Linear
    budget = Budget(size)
    assert quicken(made, budget) == 2 and budget.left == 0
    # There is none left for the output layer, which then goes as before.
    plain = net(mx.float16)
    assert words(made(mx.array([[3]]))) == words(plain(mx.array([[3]])))
    assert budget.left == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("cut", ["half", "one"])
def test_kernels_that_add_in_another_order_are_seen_and_not_used(
    dtype, cut, monkeypatch, tried_anew
):
    def in_parts(self, x):
        inputs = x.shape[-1]
        at = inputs // 2 + 1 if cut == "half" else inputs - 2
        single = x.astype(mx.float32)
        left, right = single[..., :at] @ self.copy[:at], single[..., at:] @ self.copy[at:]
        return (left + right).astype(self.dtype)

    monkeypatch.setattr(QuickProduct, "__call__", in_parts)
    assert not same_sums(dtype)
    made = net(dtype)
    assert quicken(made) == 0
    assert type(made.up) is type(made.down) is nn.Linear
    assert type(made.embed) is nn.Embedding


def test_a_loaded_model_decodes_the_same_bits_and_prefills_them(monkeypatch):
    said = []
    for by in (products.quicken, lambda network: 0):
        monkeypatch.setattr(mlxlm, "quicken", by)
        generation = engine.load_model(TRAINED).new_generation()
        generation.prefill([5, 9, 33, 70, 11])
        logits = [generation.step(12)]
        for _ in range(6):
            logits.append(generation.step(logits[-1].argmax()))
        logits += generation.block([logits[-1].argmax(), 4, 8])
        said.append([one.digest() for one in logits])
    assert said[0] == said[1]
