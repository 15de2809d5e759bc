"""The loader, and the only file that touches ``mlx_lm``, whose classes change in patch releases.

It takes from mlx-lm the network, its weights and the tokenizer; the cache classes only to learn
what each layer wants. Whatever the planes cannot stand in for is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import StrictDataclassError
from mlx.utils import tree_map_with_path

from engine import backend, chat, config_checks, config_rope
from engine.architectures import ARCHITECTURES, Architecture
from engine.config_checks import Fields
from engine.dtypes import mlx_dtype, require_little_endian
from engine.encodings import dtype_name, encoding_named
from engine.errors import ModelFolderError, UnsupportedCacheError
from engine.fingerprint import numerics_of
from engine.folder import find_folder, require_files
from engine.folder_checks import require_config, require_weights
from engine.folding import fold
from engine.identity import arguments_of, identity_of, read_json_object
from engine.mapping import LayerCacheKind, ProbedNetwork, probe_network
from engine.model import LoadedParts, Model
from engine.origins import PlaneLayout
from engine.products import quicken
from engine.transformers_import import quick_scan
from kvpack.errors import FormatError
from kvpack.layout import Encoding

with quick_scan():
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
    from mlx_lm.models.gemma3_text import RMSNorm as GemmaNorm
    from mlx_lm.models.muse_glimmer import Attention as MuseAttention
    from mlx_lm.models.muse_glimmer import CenteredRMSNorm
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.utils import load_model as load_network
    from mlx_lm.utils import load_tokenizer as _load_tokenizer_files

#: Measured on MLX's CPU backend: attention reads head-major planes faster than token-major ones.
DEFAULT_PLANE_LAYOUT: Final = PlaneLayout.HEAD_MAJOR

#: Norms that add one to their weight at every call.
_OFFSET_NORMS: Final = (CenteredRMSNorm, GemmaNorm)

#: What mlx-lm and the tokenizers raise for a folder that they cannot use.
_BROKEN_FOLDER: Final = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
    OSError,
    StrictDataclassError,
)


def load_model(
    folder: Path | str,
    *,
    dtype: str | None = None,
    plane_layout: PlaneLayout | None = None,
    chat_template: str | None = None,
    allow_float32: bool = False,
) -> Model:
    """Load a model and bind it to the calling thread. Nothing is asked of any network.

    Args:
        folder: A folder in Hugging Face layout with ``config.json``, ``model*.safetensors`` and a
            tokenizer; or ``owner/name``, with ``@revision`` or without, if the local Hugging Face
            cache has it.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``; None keeps the weights' own, except
            that mixture-of-experts layers on MLX's CPU exist in float32 only.
        plane_layout: Axis order of the planes; None for the backend's default.
        chat_template: A Jinja template in place of the folder's own; part of the identity.
        allow_float32: Take float32 where a half would do: to measure by. No node asks for it.

    Raises:
        ModelFolderError: One line naming what is missing, damaged, contradictory or not supported.
        BackendError: The process is set up so that results could not be repeated.
        ValueError: ``dtype`` is not one of the three names.
    """
    backend.require_repeatable()
    require_little_endian()
    found = find_folder(Path(folder))
    weight_files = require_files(found.folder)
    config = read_json_object(found.folder / "config.json")
    architecture = _architecture(found.folder, config)
    fields = config_checks.text_fields(config)
    require_weights(found.folder, weight_files, fields, chosen=dtype is not None)
    require_config(fields, architecture)
    network, end_ids = _load_network(found.folder, config)
    _cast(network, dtype)
    probed = _probe(network, fields, architecture)
    if not allow_float32:
        _require_encoding(network, probed.layout.encoding)
    tokenizer = _load_tokenizer(found.folder, chat_template)
    layout, planes = probed.layout, plane_layout or DEFAULT_PLANE_LAYOUT
    # Only MLX's GPU backends have kernels for RoPE and norms.
    on_cpu = backend.backend_name() == "cpu"
    if on_cpu:
        quicken(network)
    rows = mlx_dtype(layout.encoding)
    fold(network, _OFFSET_NORMS, rows, no_kernels=on_cpu, attentions=(MuseAttention,))
    template = getattr(tokenizer, "chat_template", None)
    return Model(
        LoadedParts(
            name=found.name,
            call=lambda ids, caches: network(ids, cache=caches),
            tokenizer=tokenizer,
            layout=layout,
            plane_layout=planes,
            vocab_size=probed.vocab_size,
            identity=identity_of(
                found.folder,
                weight_files,
                fields,
                arguments_of(_text_args(network)),
                layout,
                template,
            ),
            numerics=numerics_of(layout, planes),
            end_token_ids=chat.end_token_ids_of(end_ids, tokenizer, probed.vocab_size),
        )
    )


def _architecture(folder: Path, config: Fields) -> Architecture:
    """What is known of the config's ``model_type``.

    A type that is not known may still be one whose caches could never be held; then it is refused
    by the name of the cache, which says more than a list of names.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    with contextlib.suppress(*_BROKEN_FOLDER), _offline():
        network, _ = load_network(folder, lazy=True, strict=False)
        _cache_kinds(network)
    names = ", ".join(sorted(ARCHITECTURES))
    return config_checks.refuse("model_type", f"one of {names}", repr(model_type))


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Hold down the hub library's own switch: whatever is not in the folder is an error."""
    before = hub_constants.HF_HUB_OFFLINE
    hub_constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub_constants.HF_HUB_OFFLINE = before


def _load_network(folder: Path, config: Fields) -> tuple[Any, object]:
    """The network with its weights, and the ids that are said to end a text.

    mlx-lm compares names and shapes of both, and lets the generation config speak before the
    config where they name other ids.
    """
    changes = config_rope.older_form(config)
    try:
        with _offline():
            network, read = load_network(folder, strict=True, model_config=changes)
    except _BROKEN_FOLDER as error:
        kind = config.get("model_type")
        raise ModelFolderError(f"{folder}: {kind}: {_one_line(error)}") from error
    return network, read.get("eos_token_id")


def _text_args(network: Any) -> Any:  # noqa: ANN401
    """Arguments of the language model, which some architectures nest."""
    return getattr(network, "language_model", network).args


def _load_tokenizer(folder: Path, chat_template: str | None) -> Any:  # noqa: ANN401
    # Bound first: strict mypy refuses a direct call of an untyped function.
    load: Any = _load_tokenizer_files
    template = {} if chat_template is None else {"chat_template": chat_template}
    try:
        with _offline():
            # Left unsaid, a folder with code of its own would make transformers ask on the
            # terminal.
            tokenizer = load(folder, {"trust_remote_code": False, **template})
    except Exception as error:
        # The tokenizers library raises Exception itself, and no subclass. Whatever else is not
        # known to mean a broken folder is a fault of the code and stays one.
        if type(error) is not Exception and not isinstance(error, _BROKEN_FOLDER):
            raise
        raise ModelFolderError(f"{folder}: tokenizer: {_one_line(error)}") from error
    chat.settle(tokenizer)
    return tokenizer


def _one_line(error: BaseException) -> str:
    """A foreign error on one line, shortened: it may list hundreds of parameters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


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


def _probe(network: Any, fields: Fields, architecture: Architecture) -> ProbedNetwork:  # noqa: ANN401
    """The layout that the network has, once the config says nothing else."""
    kinds = _cache_kinds(network)
    config_checks.require_windows(fields, [kind.window_tokens for kind in kinds])
    try:
        probed = probe_network(
            lambda ids, caches: network(ids, cache=caches),
            network.layers,
            kinds,
            _text_args(network),
            architecture.rope_flag,
            config_checks.max_context_tokens(fields, architecture),
        )
    except (*_BROKEN_FOLDER, FormatError) as error:
        raise ModelFolderError(f"the network does not run: {_one_line(error)}") from error
    config_rope.require_rope(fields, probed.layout)
    return probed


def _cache_kinds(network: Any) -> Sequence[LayerCacheKind]:  # noqa: ANN401
    """What each layer's own cache is, or a refusal by the name of its class."""
    return [_cache_kind(layer, cache) for layer, cache in enumerate(make_prompt_cache(network))]


def _cache_kind(layer: int, cache: Any) -> LayerCacheKind:  # noqa: ANN401
    name = type(cache).__name__
    if type(cache) is KVCache:
        return LayerCacheKind(None)
    if type(cache) is not RotatingKVCache:
        raise UnsupportedCacheError(layer, name)
    if cache.keep != 0:
        raise UnsupportedCacheError(layer, f"{name} with keep={cache.keep}")
    if not isinstance(cache.max_size, int):
        # Without a window mlx-lm would build a ring that cannot say when it is full.
        raise ModelFolderError(f"layers[{layer}].window: expected a number, found {cache.max_size}")
    return LayerCacheKind(cache.max_size)


def _require_encoding(network: Any, encoding: Encoding) -> None:  # noqa: ANN401
    """Full precision is for backends that have no half: elsewhere it doubles every pack."""
    if encoding is Encoding.F32LE and not _has_experts(network):
        raise ModelFolderError("weights are float32; load with dtype='float16' or dtype='bfloat16'")
