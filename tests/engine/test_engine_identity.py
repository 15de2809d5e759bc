"""Faults 6 and 7: equal shapes of another making are refused by name, before anything is touched.

A pack is sealed with one model and opened for another that differs in one thing only. The refusal
names the first field that differs and both values, and a live session goes on as its twin.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
import pytest
from engine_support import HEAD, TOKEN, ModelCase, greedy, run_calls, tokens, write_model
from mlx_lm.utils import load_model as load_network
from mlx_lm.utils import save_model

import engine
from engine import Generation, Model
from kvpack.bundle import BundleReader, Header, read_snapshot, write_snapshot
from kvpack.errors import IdentityMismatchError, LayoutMismatchError
from kvpack.identity import require_same_identity
from kvpack.keys import Keyring, generate_key

Load = Callable[[ModelCase], Model]
W, T = 8, 5
KEY = generate_key("acme")


def session(model: Model, length: int) -> Generation:
    generation = model.new_generation()
    run_calls(generation, tokens(length), [length])
    return generation


def pack_of(model: Model, length: int = T) -> bytes:
    generation, sink = session(model, length), io.BytesIO()
    header = Header.of(model.identity("acme"), KEY.epoch)
    snapshot = generation.snapshot(tokens(length))
    write_snapshot(sink, KEY, header, snapshot, model.numerics(), generation.schedule)
    return sink.getvalue()


def restored(pack: bytes, model: Model) -> Generation:
    """Identity first: no installer, no memory, no row before it."""
    reader = BundleReader(io.BytesIO(pack), Keyring([KEY]))
    require_same_identity(model.identity("acme"), reader.header.identity)
    installer = model.installer(reader.manifest.position)
    for tile in read_snapshot(reader).tiles:
        installer.scatter(tile)
    return installer.finish(reader.manifest.schedule)


def edit(folder: Path, name: str, change: Callable[[dict], None]) -> None:
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))


def requantised(folder: Path) -> None:
    """The same weights, quantised: what the loader reads differs, shapes of rows do not."""
    network, config = load_network(folder, strict=True)
    nn.quantize(network, group_size=64, bits=4)
    (folder / "model.safetensors").unlink()
    save_model(folder, network)
    config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))


def other_merges(folder: Path) -> None:
    def change(value: dict) -> None:
        value["model"]["merges"] = [["a", "b"]]
        value["model"]["vocab"]["ab"] = 400

    edit(folder, "tokenizer.json", change)


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def other_rope_base(folder: Path) -> None:
    edit(folder, "config.json", lambda value: value.update(rope_theta=10_000.0))


def wider_window(folder: Path) -> None:
    edit(folder, "config.json", lambda value: value.update(sliding_window=W + 1))


OTHERS = [
    (requantised, "weights_digest"),
    (other_merges, "tokenizer_digest"),
    (other_template, "chat_template_digest"),
    (other_rope_base, "layers[0].rope"),
    (wider_window, "layers[0].window_tokens"),
]


def refused(pack: bytes, other: Model) -> IdentityMismatchError | LayoutMismatchError:
    """The refusal, once a live session of ``other`` was seen to go on as its twin."""
    live, twin = session(other, 2 * W + 3), session(other, 2 * W + 3)
    before = live.snapshot(tokens(2 * W + 3)).tiles
    with pytest.raises((IdentityMismatchError, LayoutMismatchError)) as caught:
        restored(pack, other)
    assert live.snapshot(tokens(2 * W + 3)).tiles == before
    assert [a.data for a in greedy(live, 9, 8)] == [b.data for b in greedy(twin, 9, 8)]
    error = caught.value
    assert error.expected != error.found
    assert str(error.expected) in str(error) and str(error.found) in str(error)
    return error


@pytest.mark.parametrize(
    ("change", "field"), OTHERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_model_that_differs_in_one_thing_is_refused(
    change: Callable[[Path], None],
    field: str,
    load: Load,
    model_folder: Callable[[ModelCase], Path],
    tmp_path: Path,
) -> None:
    """Also where no ring is full: five rows fit a window of 8 as they fit one of 9."""
    folder = tmp_path / "other"
    shutil.copytree(model_folder(ModelCase()), folder)
    change(folder)
    error = refused(pack_of(load(ModelCase())), engine.load_model(folder))
    assert error.field == field


def test_a_sibling_of_another_seed_is_refused(load: Load) -> None:
    error = refused(pack_of(load(ModelCase())), load(ModelCase(seed=8)))
    assert error.field == "weights_digest"


def test_quantisation_alone_is_named(load: Load) -> None:
    """The same digest under another rule cannot happen by itself; the field exists all the same."""
    ours = load(ModelCase()).identity("acme")
    theirs = type(ours)(**{
        name: getattr(ours, name) for name in ours.__dataclass_fields__ if name != "quantisation"
    }, quantisation="affine bits=6 group=64")  # fmt: skip
    with pytest.raises(IdentityMismatchError, match="quantisation: expected none, found affine"):
        require_same_identity(ours, theirs)


@pytest.fixture(scope="module")
def by_dtype(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """One folder of float32 weights, loaded in each half: the KV storage setting is the dtype."""
    folder = write_model(tmp_path_factory.mktemp("f32") / "m", ModelCase("exaone4", "float32"))
    return {name: engine.load_model(folder, dtype=name) for name in ("float16", "bfloat16")}


@pytest.mark.parametrize(("saved", "loaded"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_equal_weights_in_another_dtype_are_refused(
    saved: str, loaded: str, by_dtype: dict[str, Model]
) -> None:
    """Two bytes an element either way: only the name tells them apart."""
    error = refused(pack_of(by_dtype[saved]), by_dtype[loaded])
    # The convention of a row comes first, and it ends with the dtype.
    assert error.field == "engine_abi"
    assert str(error.expected).endswith(loaded) and str(error.found).endswith(saved)


@pytest.mark.parametrize(("saved", "loaded"), [(HEAD, TOKEN), (TOKEN, HEAD)])
def test_another_plane_layout_is_an_exact_conversion(
    saved: engine.PlaneLayout, loaded: engine.PlaneLayout, load: Load
) -> None:
    """Packs hold rows in logical order: the layout is not identity. Numerics tell it, by name."""
    source, target = load(ModelCase(layout=saved)), load(ModelCase(layout=loaded))
    length = 2 * W + 3
    moved = restored(pack_of(source, length), target)
    tiles = session(source, length).snapshot(tokens(length)).tiles
    assert moved.snapshot(tokens(length)).tiles == tiles
    difference = source.numerics().first_difference(target.numerics())
    assert difference == ("plane_layout", saved.value, loaded.value)


def test_the_very_model_is_not_refused(load: Load) -> None:
    """Or every test above would pass for a gate that refuses everything."""
    model = load(ModelCase())
    for length in (T, 2 * W + 3):
        moved, twin = restored(pack_of(model, length), model), session(model, length)
        assert moved.step(7).data == twin.step(7).data
