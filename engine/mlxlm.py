"""The loader, and the only file that touches ``mlx_lm``, whose classes change in patch releases.

It takes from mlx-lm the network, its weights and the tokenizer; the cache classes only to learn
what each layer wants. Whatever the planes cannot stand in for is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model as load_network
from mlx_lm.utils import load_tokenizer as _load_tokenizer_files

from engine import backend
from engine.dtypes import dtype_name, encoding_named, mlx_dtype, require_little_endian
from engine.errors import ModelFolderError, UnsupportedCacheError
from engine.fingerprint import TOKENIZER_FILES, identity_of, numerics_of, read_json_object
from engine.mapping import ROPE_FLAGS, LayerCacheKind, ProbedNetwork, probe_network
from engine.model import LoadedParts, Model
from engine.origins import PlaneLayout
from kvpack.errors import FormatError
from kvpack.layout import Encoding

#: Measured on MLX's CPU backend: attention reads head-major planes faster than token-major ones.
DEFAULT_PLANE_LAYOUT: Final = PlaneLayout.HEAD_MAJOR

_CONTEXT_KEYS: Final = ("max_position_embeddings", "model_max_length")
_BROKEN_FOLDER: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


def load_model(
    folder: Path, *, dtype: str | None = None, plane_layout: PlaneLayout | None = None
) -> Model:
    """Load a model folder in Hugging Face layout and bind it to the calling thread.

    Args:
        folder: Holds ``config.json``, ``model*.safetensors`` and a tokenizer.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``; None keeps the weights' own, except
            that mixture-of-experts layers on MLX's CPU exist in float32 only.
        plane_layout: Axis order of the planes; None for the backend's default.

    Raises:
        ModelFolderError: One line naming what is missing, damaged or not supported.
        BackendError: The process is set up so that results could not be repeated.
        ValueError: ``dtype`` is not one of the three names.
    """
    backend.require_repeatable()
    require_little_endian()
    folder = Path(folder)
    weight_files = _require_files(folder)
    config = read_json_object(folder / "config.json")
    model_type = config.get("model_type")
    if model_type not in ROPE_FLAGS:
        names = ", ".join(sorted(ROPE_FLAGS))
        raise ModelFolderError(f"config.json: model_type {model_type!r} is not among {names}")
    _require_layer_types(config)
    network = _load_network(folder, model_type)
    _cast(network, dtype)
    probed = _probe(network, _max_context_tokens(config))
    _require_encoding(network, probed.layout.encoding)
    tokenizer = _load_tokenizer(folder)
    layout, planes = probed.layout, plane_layout or DEFAULT_PLANE_LAYOUT
    template = getattr(tokenizer, "chat_template", None)
    return Model(
        LoadedParts(
            name=folder.resolve().name,
            call=lambda ids, caches: network(ids, cache=caches),
            tokenizer=tokenizer,
            layout=layout,
            plane_layout=planes,
            vocab_size=probed.vocab_size,
            identity=identity_of(folder, weight_files, config, network.args, layout, template),
            numerics=numerics_of(layout, planes),
        )
    )


def _require_files(folder: Path) -> list[Path]:
    """The weight files, once everything that a model folder needs is there."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: not a folder")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder}: config.json is missing")
    weight_files = sorted(folder.glob("model*.safetensors"))
    if not weight_files:
        raise ModelFolderError(f"{folder}: weights (model*.safetensors) are missing")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFolderError(f"{folder}: a tokenizer (tokenizer.json) is missing")
    return weight_files


def _load_network(folder: Path, model_type: object) -> Any:  # noqa: ANN401  mlx-lm is untyped
    """The network with its weights; mlx-lm compares names and shapes of both."""
    try:
        network, _ = load_network(folder, strict=True)
    except (*_BROKEN_FOLDER, OSError) as error:
        raise ModelFolderError(f"{folder}: {model_type}: {_one_line(error)}") from error
    return network


def _require_layer_types(config: dict[str, Any]) -> None:
    """One kind per layer: mlx-lm would index past a short list and ignore the end of a long one."""
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        kinds, count = source.get("layer_types"), source.get("num_hidden_layers")
        if isinstance(kinds, list) and isinstance(count, int) and len(kinds) != count:
            raise ModelFolderError(
                f"config.json: layer_types has {len(kinds)} entries for {count} layers"
            )


def _load_tokenizer(folder: Path) -> Any:  # noqa: ANN401  mlx-lm is untyped
    # Bound first: strict mypy refuses a direct call of an untyped function.
    load: Any = _load_tokenizer_files
    try:
        # Left unsaid, a folder with code of its own would make transformers ask on the terminal.
        return load(folder, {"trust_remote_code": False})
    except (*_BROKEN_FOLDER, OSError) as error:
        raise ModelFolderError(f"{folder}: tokenizer: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """The first line of a foreign error, shortened: it may list hundreds of parameters."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


def _max_context_tokens(config: dict[str, Any]) -> int:
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            if isinstance(source.get(key), int):
                return int(source[key])
    raise ModelFolderError(f"config.json: {_CONTEXT_KEYS[0]} is missing")


def _has_experts(network: Any) -> bool:  # noqa: ANN401
    kinds = (SwitchLinear, QuantizedSwitchLinear)
    return any(isinstance(module, kinds) for _, module in network.named_modules())


def _cast(network: Any, dtype: str | None) -> None:  # noqa: ANN401
    """Bring floating weights to one dtype, except those the model keeps apart."""
    if dtype is None and _has_experts(network) and backend.backend_name() == "cpu":
        dtype = dtype_name(Encoding.F32LE)
    if dtype is None:
        return
    target = mlx_dtype(encoding_named(dtype))
    may_cast = getattr(network, "cast_predicate", lambda _: True)

    def cast(path: str, array: mx.array) -> mx.array:
        wanted = mx.issubdtype(array.dtype, mx.floating) and may_cast(path)
        return array.astype(target) if wanted else array

    network.update(tree_map_with_path(cast, network.parameters()))
    mx.eval(network.parameters())


def _probe(network: Any, max_context_tokens: int) -> ProbedNetwork:  # noqa: ANN401
    try:
        return probe_network(
            lambda ids, caches: network(ids, cache=caches),
            network.layers,
            _cache_kinds(network),
            network.args,
            max_context_tokens,
        )
    except (*_BROKEN_FOLDER, FormatError) as error:
        raise ModelFolderError(f"the network does not run: {_one_line(error)}") from error


def _cache_kinds(network: Any) -> Sequence[LayerCacheKind]:  # noqa: ANN401
    """What each layer's own cache is, or a refusal by the name of its class."""
    kinds = []
    for layer, cache in enumerate(make_prompt_cache(network)):
        if type(cache) is KVCache:
            kinds.append(LayerCacheKind(None))
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            kinds.append(LayerCacheKind(cache.max_size))
        else:
            raise UnsupportedCacheError(layer, type(cache).__name__)
    return kinds


def _require_encoding(network: Any, encoding: Encoding) -> None:  # noqa: ANN401
    """Full precision is for backends that have no half: elsewhere it doubles every pack."""
    if encoding is Encoding.F32LE and not _has_experts(network):
        raise ModelFolderError("weights are float32; load with dtype='float16' or dtype='bfloat16'")
