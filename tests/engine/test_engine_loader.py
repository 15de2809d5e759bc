"""The loader: what a folder must hold, what is refused and how it is named; identity."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine_support import HEAD, ModelCase, tokens, write_model

import engine
from engine import Model, ModelFolderError, PlaneLayout, backend, fingerprint, identity, mlxlm
from kvpack.errors import IdentityMismatchError, LayoutMismatchError
from kvpack.identity import require_same_identity
from kvpack.layout import Encoding, LayerKind

Load = Callable[[ModelCase], Model]
Folder = Callable[[ModelCase], Path]


@pytest.fixture
def folder(tmp_path: Path, model_folder: Callable[[ModelCase], Path]) -> Path:
    """A folder of its own, to be damaged."""
    copy = tmp_path / "model"
    shutil.copytree(model_folder(ModelCase()), copy)
    return copy


def edit(folder: Path, name: str = "config.json", **changes: object) -> Path:
    config = json.loads((folder / name).read_text())
    config.update(changes)
    (folder / name).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_missing_file_is_named(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelFolderError, match=message) as caught:
        engine.load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="not a folder"):
        engine.load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers: expected 4, as the weights have, found 3"),
        (
            {"num_hidden_layers": 3, "layer_types": None},
            "num_hidden_layers: expected 4, .* found 3",
        ),
        (
            {"num_hidden_layers": 8, "layer_types": None},
            "num_hidden_layers: expected 4, .* found 8",
        ),
        ({"num_key_value_heads": 1}, "num_key_value_heads: expected 64 rows .* found 1 heads"),
        ({"head_dim": 16}, "head_dim: expected 32, .* found 16"),
        ({"vocab_size": 256}, "vocab_size: expected 320, as the embedding has, found 256"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "expected 4 entries, .* found 2",
        ),
        ({"model_type": "llama4"}, "model_type: expected one of afmoe, .* found 'llama4'"),
        ({"model_type": None}, "model_type: .* found None"),
        ({"max_position_embeddings": None, "model_max_length": None}, "max_position_embeddings"),
        ({"model_file": "evil.py"}, "custom module"),
        ({"sliding_window": 0}, "sliding_window: expected a positive integer, found 0"),
    ],
)
def test_config_is_checked_against_the_weights(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelFolderError, match=message) as caught:
        engine.load_model(edit(folder, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00"])
def test_damaged_text_files(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFolderError):
        engine.load_model(folder)


def test_loading_opens_no_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model folder is local; nothing may be asked elsewhere")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    engine.load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_is_never_run(folder: Path, name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')")
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}}
    edit(folder, name, **code, model_file="evil.py", tokenizer_class="Evil")
    with contextlib.suppress(ModelFolderError):
        engine.load_model(folder)
    assert not mark.exists()


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelFolderError):
        engine.load_model(folder)


def test_unsupported_caches_are_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

    for bad in (ChunkedKVCache(8), QuantizedKVCache(), RotatingKVCache(8, keep=4)):
        wanted = [KVCache(), bad, KVCache(), KVCache()]
        monkeypatch.setattr(mlxlm, "make_prompt_cache", lambda _, caches=wanted: caches)
        with pytest.raises(engine.UnsupportedCacheError, match=type(bad).__name__) as caught:
            engine.load_model(folder)
        assert caught.value.layer == 1


@pytest.mark.parametrize("arch", ["muse_glimmer", "cohere2", "exaone4", "afmoe"])
def test_layout_of_each_architecture(arch: str, load: Load) -> None:
    model = load(ModelCase(arch, layers=4, window=8))
    kinds = [layer.kind for layer in model.layout.layers]
    assert kinds == [LayerKind.SWA] * 3 + [LayerKind.FULL]
    for layer in model.layout.layers:
        assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (2, 32, 32)
        assert (layer.rope is None) is (layer.kind is LayerKind.FULL)
        assert layer.window_tokens == (8 if layer.kind is LayerKind.SWA else None)
    assert model.layout.layers[0].rope.interleaved is (arch == "cohere2")
    assert model.layout.encoding is (Encoding.F32LE if arch == "afmoe" else Encoding.F16LE)
    assert model.vocab_size == 320 and model.window_tokens == 8
    assert model.layout.max_context_tokens == 131_072


def test_experts_run_in_float32_on_the_cpu(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", ModelCase("afmoe", "bfloat16"))
    model = engine.load_model(folder)
    assert model.layout.encoding is Encoding.F32LE
    assert np.isfinite(model.new_generation().step(1).values()).all()


def test_float32_without_need_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", ModelCase("exaone4", "float32"))
    with pytest.raises(ModelFolderError, match="float32"):
        engine.load_model(folder)
    for name, encoding in (("float16", Encoding.F16LE), ("bfloat16", Encoding.BF16LE)):
        assert engine.load_model(folder, dtype=name).layout.encoding is encoding
    with pytest.raises(ValueError, match="dtype"):
        engine.load_model(folder, dtype="float8")


def test_another_thread_is_refused(load: Load) -> None:
    model, caught = load(ModelCase()), []

    def use() -> None:
        try:
            model.new_generation()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(timeout=10)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("case", "field"),
    [
        (ModelCase(seed=8), "weights_digest"),
        (ModelCase(window=9), "layers[0].window_tokens"),
        (ModelCase(dtype="bfloat16"), "weights_digest"),
        (ModelCase(layers=5), "weights_digest"),
        (ModelCase("exaone4"), "weights_digest"),
    ],
)
def test_identity_differs_where_rows_would(case: ModelCase, field: str, load: Load) -> None:
    ours, theirs = load(ModelCase()).identity("acme"), load(case).identity("acme")
    with pytest.raises((IdentityMismatchError, LayoutMismatchError)) as caught:
        require_same_identity(ours, theirs)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("config.json", {"rope_theta": 10_000.0}, "layers[0].rope"),
        ("config.json", {"rms_norm_eps": 1e-6}, "constants[rms_norm_eps]"),
        ("config.json", {"qk_scale_factor": 3.88}, "constants[qk_scale_factor]"),
        (
            "config.json",
            {"rope_parameters": {"rope_theta": 500_000.0}},
            "constants[non_scalar_arguments]",
        ),
        ("config.json", {"max_position_embeddings": 4096}, "max_context_tokens"),
        ("tokenizer_config.json", {"add_prefix_space": True}, "tokenizer_digest"),
        ("tokenizer_config.json", {"eos_token": "<|turn_end|>"}, "tokenizer_digest"),
    ],
)
def test_one_changed_setting_is_another_identity(
    folder: Path, name: str, changes: dict[str, object], field: str
) -> None:
    ours = engine.load_model(folder).identity("acme")
    theirs = engine.load_model(edit(folder, name, **changes)).identity("acme")
    with pytest.raises((IdentityMismatchError, LayoutMismatchError)) as caught:
        require_same_identity(ours, theirs)
    assert caught.value.field == field


def test_tokenizer_and_template_are_told_apart(folder: Path) -> None:
    ours = engine.load_model(folder).identity("acme")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    template = engine.load_model(folder).identity("acme")
    with pytest.raises(IdentityMismatchError, match="chat_template_digest"):
        require_same_identity(ours, template)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = [["a", "b"]]
    content["model"]["vocab"]["ab"] = 400
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(IdentityMismatchError, match="tokenizer_digest"):
        require_same_identity(template, engine.load_model(folder).identity("acme"))


def test_path_name_and_plane_layout_are_not_identity(
    tmp_path: Path, folder: Path, load: Load
) -> None:
    other = shutil.copytree(folder, tmp_path / "another name")
    ours = engine.load_model(folder)
    theirs = engine.load_model(other, plane_layout=PlaneLayout.TOKEN_MAJOR)
    assert ours.identity("acme") == theirs.identity("acme")
    assert (ours.name, theirs.name) == ("model", "another name")
    with pytest.raises(IdentityMismatchError, match="tenant"):
        require_same_identity(ours.identity("acme"), ours.identity("other"))


def test_numerics_name_what_decides_bits(load: Load) -> None:
    head = load(ModelCase()).numerics()
    token = load(ModelCase(layout=PlaneLayout.TOKEN_MAJOR)).numerics()
    assert head.first_difference(token) == ("plane_layout", "head-major", "token-major")
    assert head.first_difference(load(ModelCase(seed=8)).numerics()) is None
    values = dict(head.values)
    assert values["mlx"] == "0.32.4" and values["mlx_lm"] == "0.32.2"
    assert {"backend", "device", "dtype", "numerics_revision", "os"} <= set(values)
    assert values["switch.MLX_CUDA_USE_CUDNN_SDPA"] == "0"


def test_numerics_name_what_decides_a_sampled_token(
    load: Load, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above temperature 0 the host's exponentials and sums choose: NumPy's, by processor."""
    head = load(ModelCase()).numerics()
    assert dict(head.values)["numpy"] == np.__version__
    assert "exp=" in dict(head.values)["numpy_kernels"]
    folder = model_folder(ModelCase())
    with monkeypatch.context() as patch:
        patch.setattr(np, "__version__", "2.99.0")
        other = engine.load_model(folder).numerics()
    assert head.first_difference(other) == ("numpy", np.__version__, "2.99.0")
    with monkeypatch.context() as patch:
        plain = {"exp": {"dd": {"current": "baseline(X86_V2)"}}}
        patch.setattr(fingerprint, "opt_func_info", lambda **_: plain)
        other = engine.load_model(folder).numerics()
    assert head.first_difference(other)[0] == "numpy_kernels"
    assert dict(other.values)["numpy_kernels"] == "exp=baseline(X86_V2)"


def test_numerics_name_what_fused_operations_make_of_numbers(
    load: Load, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX compiles them at run time: with another compiler they may round another way."""
    head = load(ModelCase()).numerics()
    assert len(dict(head.values)["compiled"]) == 8

    def once_rounded(left: mx.array, right: mx.array) -> mx.array:
        wide = left.astype(mx.float32), right.astype(mx.float32)
        return (wide[0] * mx.sigmoid(wide[0]) * wide[1] + wide[0]).astype(left.dtype)

    monkeypatch.setattr(fingerprint, "_fused", once_rounded)
    other = engine.load_model(model_folder(ModelCase())).numerics()
    assert head.first_difference(other)[0] == "compiled"


def test_file_digests_are_cached_and_notice_changes(tmp_path: Path) -> None:
    digests, file = identity.FileDigests(), tmp_path / "big"
    file.write_bytes(b"one")
    first = digests.digest(file)
    assert digests.digest(file) == first and len(digests._kept) == 1
    file.write_bytes(b"other")
    assert digests.digest(file) != first
    replacement = tmp_path / "new"
    replacement.write_bytes(b"one")
    replacement.replace(file)
    assert digests.digest(file) == first and len(digests._kept) == 3


def test_cuda_is_refused_when_the_switch_came_too_late() -> None:
    with pytest.raises(engine.BackendError, match="MLX_CUDA_USE_CUDNN_SDPA"):
        backend.check_switch("cuda", too_late=True)
    for name, late in (("cuda", False), ("cpu", True), ("metal", True)):
        backend.check_switch(name, too_late=late)


def test_the_switch_is_set_before_mlx_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_state", {"too_late": False})
    monkeypatch.delenv(backend.CUDNN_SWITCH)
    with monkeypatch.context() as scope:
        scope.setattr(backend.sys, "modules", {})
        backend.set_switches()
        assert backend.os.environ[backend.CUDNN_SWITCH] == "0"
        assert backend._state["too_late"] is False
        scope.setenv(backend.CUDNN_SWITCH, "1")
        backend.set_switches()
        assert backend._state["too_late"] is True
    backend._state["too_late"] = False
    monkeypatch.delenv(backend.CUDNN_SWITCH)
    backend.set_switches()
    assert backend._state["too_late"] is True, "mlx.core is imported in this process"


def test_text_round_trips(load: Load) -> None:
    model = load(ModelCase())
    text = "Grüße, 世界! 👩‍🚀 \n\ttabs, <|role|> and\x00nul"
    ids = model.encode(text)
    assert model.decode(ids) == text
    assert model.encode("abc") == [97, 98, 99]
    assert model.decode([256]) == "<|begin|>"
    assert model.decode(tokens(5)) == model.decode(tuple(tokens(5)))


def test_repr_shows_no_weights(load: Load) -> None:
    model = load(ModelCase(layout=HEAD))
    assert repr(model) == f"Model({model.name!r}, 4 layers)"
