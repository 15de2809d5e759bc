"""A network of transformers and what it keeps: the one file that touches torch and transformers.

transformers' own cache keeps ``window - 1`` rows of a sliding layer after a call, which is all that
its next call reads; a cut holds ``window`` of them. It joins old and new rows into fresh memory at
every call, head by head. So the rows are kept here: one buffer for all layers of a shape, token by
token as a tile holds them, into which every layer writes its new rows and out of which attention
reads a view. The rows of a tile then lie as its bytes have to, and leave a GPU by one gathering and
one copy into pinned memory.

*A window's buffer* is longer than the window: rows are appended until it is full, then the last
window moves to its front. So rows of a window always lie in one piece, oldest first, and those of a
cut stay until the call after it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from engine.described import DescribedFolder
from engine.encodings import dtype_name
from engine.errors import ModelFolderError
from engine.oracle.weights import HEAD_PREFIX, IGNORED, TEXT_PREFIXES
from kvpack.layout import CacheLayout, Encoding, LayerLayout
from kvpack.snapshot import TileSpec
from node.errors import UsageError

#: Raised whenever this file's own call shapes change bits.
REVISION: Final = "torch-1"

#: Rows that a full layer's buffer begins with, and what a window's is longer than two windows by.
_FIRST_ROWS: Final = 2048
_SPARE_ROWS: Final = 512

_DTYPES: Final = {
    Encoding.F16LE: torch.float16,
    Encoding.BF16LE: torch.bfloat16,
    Encoding.F32LE: torch.float32,
}

#: Module, class of the text network and class of its config, by ``model_type``.
_CLASSES: Final = {
    "muse_glimmer": ("muse_glimmer", "MuseGlimmerTextModel", "MuseGlimmerTextConfig"),
    "cohere2": ("cohere2", "Cohere2Model", "Cohere2Config"),
}

#: What of a ``config.json`` is no argument of the text network's config.
_NOT_ARGUMENTS: Final = frozenset(
    {"model_type", "architectures", "torch_dtype", "dtype", "text_config", "vision_config"}
    | {"transformers_version", "auto_map"}
)

#: What a config must say as mlx-lm read it, also of a part of a network.
_FROM_ARGUMENTS: Final = (
    "layer_rope_theta", "rope_theta", "sliding_window", "head_dim", "vocab_size",
    "num_hidden_layers",
)  # fmt: skip

_LAYER: Final = re.compile(r"layers\.(\d+)\.")

_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Placing:
    """Where and how a network computes.

    Attributes:
        device: ``cuda``, ``cuda:1``, ``cpu``; None: CUDA where there is one.
        attention: Implementation of attention, as transformers names it.
    """

    device: str | None = None
    attention: str = "sdpa"

    def found(self) -> torch.device:
        """The device.

        Raises:
            UsageError: torch does not have it.
        """
        named = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(named)
        except RuntimeError as error:
            raise UsageError(f"--device {named}: expected cuda, cuda:N or cpu") from error
        if device.type not in ("cuda", "cpu"):
            raise UsageError(f"--device {named}: expected cuda, cuda:N or cpu")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {named}: torch {torch.__version__} finds no such device")
        # By number: torch makes none current that has no number.
        return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


class HostRows:
    """Rows on their way to the host."""

    __slots__ = ("_event", "_rows")

    def __init__(self, rows: Any, event: Any) -> None:  # noqa: ANN401 - torch is not typed here
        self._rows, self._event = rows, event

    def take(self) -> memoryview:
        """Their bytes, once all are there; nobody writes to them."""
        if self._event is not None:
            self._event.synchronize()
        host = self._rows.reshape(-1).view(torch.uint8).numpy()
        host.flags.writeable = False
        view: memoryview = host.data
        return view


class _Bank:
    """Rows of all layers of one shape.

    Attributes:
        layers: Which, ascending.
        rows: ``[layers, keys and values, capacity, kv_heads, dim]``.
        origin: Position of the first row in it.
        position: Where the call under way began; rows before it are whole.
    """

    def __init__(self, layers: Sequence[int], shape: LayerLayout, dtype: Any, device: Any) -> None:  # noqa: ANN401
        self.layers = tuple(layers)
        self.window = shape.window_tokens
        self._shape = (shape.kv_heads, shape.key_dim)
        self._made = {"dtype": dtype, "device": device}
        self.origin = self.position = 0
        first = _FIRST_ROWS if self.window is None else 2 * self.window + _SPARE_ROWS
        self.rows = self._empty(first)

    def begin(self, position: int, count: int) -> None:
        """Make room for a call of ``count`` tokens at ``position``."""
        self.position = position
        kept = position if self.window is None else min(position, self.window)
        capacity, slot = self.rows.shape[2], position - self.origin
        if slot + count <= capacity:
            return
        old = self.rows[:, :, slot - kept : slot]
        if kept + count > capacity:
            self.rows = self._empty(max(2 * capacity, kept + count))
        else:
            # They move within one buffer: source and destination may overlap.
            old = old.clone()
        self.rows[:, :, :kept].copy_(old)
        self.origin = position - kept

    def append(self, index: int, keys: Any, values: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Keep a layer's new rows ``[1, kv_heads, count, dim]``; all that its queries may see."""
        slot = self.position - self.origin
        end = slot + keys.shape[2]
        rows = self.rows[index]
        if keys.dtype != rows.dtype:
            raise RuntimeError(f"keys of {keys.dtype} where rows are of {rows.dtype}")
        rows[0, slot:end].copy_(keys[0].transpose(0, 1))
        rows[1, slot:end].copy_(values[0].transpose(0, 1))
        seen = rows[:, slot - self.past() : end].transpose(1, 2)
        return seen[0][None], seen[1][None]

    def past(self) -> int:
        """Rows before the call under way that its first query may see."""
        return self.position if self.window is None else min(self.position, self.window - 1)

    def part(self, layers: Sequence[int], first: int, count: int) -> Any:  # noqa: ANN401
        """Rows of some layers, ``[layers, keys and values, count, kv_heads, dim]``, as they lie."""
        chosen = [self.layers.index(layer) for layer in layers]
        slot = first - self.origin
        rows = self.rows[:, :, slot : slot + count]
        if chosen == list(range(chosen[0], chosen[-1] + 1)):
            return rows[chosen[0] : chosen[-1] + 1]
        return rows[chosen]

    def _empty(self, capacity: int) -> Any:  # noqa: ANN401
        return torch.empty((len(self.layers), 2, capacity, *self._shape), **self._made)


def _kept_by(bank: _Bank, index: int) -> Any:  # noqa: ANN401
    """What transformers takes for a layer's cache: it writes into ``bank`` and reads out of it."""

    class _Kept(DynamicLayer if bank.window is None else DynamicSlidingWindowLayer):  # type: ignore[misc]
        def update(
            self,
            key_states: Any,  # noqa: ANN401
            value_states: Any,  # noqa: ANN401
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> tuple[Any, Any]:
            return bank.append(index, key_states, value_states)

        def get_seq_length(self) -> int:
            return bank.position

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            past = bank.past()
            return past + query_length, bank.position - past

    kept = _Kept() if bank.window is None else _Kept(sliding_window=bank.window)
    kept.is_initialized = True
    return kept


class Rows:
    """The rows of one session, on the network's device.

    Attributes:
        position: Tokens whose rows are whole.
    """

    def __init__(self, layout: CacheLayout, device: Any, copies: Any) -> None:  # noqa: ANN401
        shapes: dict[LayerLayout, list[int]] = {}
        for index, layer in enumerate(layout.layers):
            shapes.setdefault(layer, []).append(index)
        dtype = _DTYPES[layout.encoding]
        self._banks = [_Bank(members, shape, dtype, device) for shape, members in shapes.items()]
        self._copies = copies
        self.position = 0
        by_layer = sorted((layer, bank) for bank in self._banks for layer in bank.layers)
        self._of = dict(by_layer)
        self.cache = Cache(
            layers=[_kept_by(bank, bank.layers.index(layer)) for layer, bank in self._of.items()]
        )

    def begin(self, count: int) -> None:
        """Make room for a call of ``count`` tokens; rows on their way to the host stay readable."""
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)
        for bank in self._banks:
            bank.begin(self.position, count)

    def end(self, count: int) -> None:
        """The call's rows are whole."""
        self.position += count
        for bank in self._banks:
            bank.position = self.position

    def to_host(self, spec: TileSpec) -> HostRows:
        """Begin to bring a tile's rows to the host. On a GPU this does not wait for them."""
        banks = [self._of[layer] for layer in spec.layers]
        parts = [
            bank.part([spec.layers[i] for i, one in enumerate(banks) if one is bank],
                      spec.first_position, spec.token_count)
            for bank in dict.fromkeys(banks)
        ]  # fmt: skip
        source = parts[0]
        if len(parts) > 1:
            raise RuntimeError("layers of one tile have several shapes")
        if self._copies is None:
            return HostRows(source.contiguous().clone(), None)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            # Gathered on the device where it does not lie in one piece, then one copy.
            host.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return HostRows(host, event)


class Network:
    """The text network of one folder, on the thread that loaded it.

    Args:
        described: The folder, or a part of it.
        placing: Where it computes.
        table: Rows of the embedding that are taken, where it is a part; None: all.

    Raises:
        ModelFolderError: The folder is not one that transformers computes.
        UsageError: The device is not there.
    """

    def __init__(
        self,
        described: DescribedFolder,
        placing: Placing,
        table: Sequence[int] | None = None,
    ) -> None:
        self._placing, self._table = placing, table
        self.device = placing.found()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False
        self._described = described
        self.layout = described.layout
        for index, layer in enumerate(self.layout.layers):
            if layer.key_dim != layer.value_dim:
                raise ModelFolderError(f"layers[{index}]: value_dim: expected {layer.key_dim}")
        self._dtype = _DTYPES[self.layout.encoding]
        self.attention = placing.attention
        self._network, self._head = self._load()
        # Named otherwise until some release of the fifth series.
        parameters = inspect.signature(type(self._network).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._copies = torch.cuda.Stream() if self.device.type == "cuda" else None

    def new_rows(self) -> Rows:
        """Those of a session that has none."""
        return Rows(self.layout, self.device, self._copies)

    def compute(self, token_ids: Sequence[int], rows: Rows) -> Any:  # noqa: ANN401
        """One call: the rows of ``token_ids`` into ``rows``; activations after the last token."""
        count, first = len(token_ids), rows.position
        with torch.inference_mode():
            rows.begin(count)
            places = torch.arange(first, first + count, device=self.device)[None]
            out = self._network(
                input_ids=torch.tensor([list(token_ids)], device=self.device),
                position_ids=places,
                use_cache=True,
                **{self._cache_name: rows.cache},
            )
            rows.end(count)
            return out.last_hidden_state[:, -1:]

    def logits(self, activations: Any) -> bytes:  # noqa: ANN401
        """``[vocab_size]`` in the rows' own type, of what :meth:`compute` gave."""
        said = self._described.arguments
        with torch.inference_mode():
            raw = torch.nn.functional.linear(activations[0, -1], self._head)
            if self._described.architecture == "cohere2":
                raw = raw * float(said["logit_scale"])
            else:
                cap = float(said["final_logit_softcapping"])
                raw = torch.tanh(raw * float(said["output_multiplier"]) / cap) * cap
            return HostRows(raw.cpu().contiguous(), None).take().tobytes()

    def finish(self) -> None:
        """Return when all that was asked for is computed."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def numerics(self) -> dict[str, str]:
        """What decides the bits of rows that are computed here."""
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else platform.machine()
        kind = torch.backends.cpu.get_cpu_capability()
        if cuda:
            major, minor = torch.cuda.get_device_capability(self.device)
            kind = f"sm_{major}{minor}"
        return {
            "attention": self.attention,
            "backend": "torch",
            "cuda": str(torch.version.cuda or "none"),
            "device": f"{self.device.type} / {name} / {kind}",
            "dtype": dtype_name(self.layout.encoding),
            "numerics_revision": REVISION,
            "numpy": np.__version__,
            "os": f"{platform.system()} {platform.release()}",
            "torch": str(torch.__version__),
            "transformers": importlib.metadata.version("transformers"),
        }

    def _load(self) -> tuple[Any, Any]:
        """The network with its weights on the device, and the table of its head."""
        module, network_class, config_class = _CLASSES[self._described.architecture]
        stem = f"transformers.models.{module}"
        try:
            made = importlib.import_module(f"{stem}.modeling_{module}")
            configs = importlib.import_module(f"{stem}.configuration_{module}")
        except ImportError as error:
            raise ModelFolderError(f"transformers has no {module}: {error}") from error
        config = getattr(configs, config_class)(**self._config_fields())
        config._attn_implementation = self.attention
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            # Without memory: a network of 30 billion weights would be written twice.
            with torch.device("meta"):
                network = getattr(made, network_class)(config)
        finally:
            torch.set_default_dtype(before)
        network.rotary_emb = type(network.rotary_emb)(config).to(self.device)
        tensors = self._read()
        head = tensors.pop(_HEAD, None)
        if head is None or self._described.fields.get("tie_word_embeddings"):
            head = tensors.get(_EMBEDDING)
        _require_names(set(network.state_dict()), set(tensors))
        network.load_state_dict(tensors, strict=True, assign=True)
        return network.eval().requires_grad_(False), head

    def _config_fields(self) -> dict[str, Any]:
        fields, arguments = self._described.fields, self._described.arguments
        given = {name: value for name, value in fields.items() if name not in _NOT_ARGUMENTS}
        kinds = [
            "full_attention" if layer.window_tokens is None else "sliding_attention"
            for layer in self.layout.layers
        ]
        # transformers fills these in by another rule than mlx-lm where a config leaves them out.
        given["layer_types"] = kinds
        for name in _FROM_ARGUMENTS:
            if name in arguments:
                given[name] = arguments[name]
        if self._table is not None:
            given |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        return given

    def part(self, layers: int, table: Sequence[int]) -> Network:
        """The first ``layers`` layers in float32, for prompts of the tokens in ``table`` alone.

        They are computed by the same code on the same device, and what it rounds hides nothing.
        """
        described = self._described.first_layers(layers, len(table))
        return Network(described, self._placing, table)

    def _read(self) -> dict[str, Any]:
        """The text network's tensors on the device, in the rows' type."""
        found: dict[str, Any] = {}
        layers = len(self.layout.layers)
        for path in self._described.weight_files:
            with safe_open(path, framework="pt", device=str(self.device)) as source:
                for stored in source.keys():  # noqa: SIM118 - no mapping
                    name = _text_name(stored)
                    match = _LAYER.match(name)
                    if IGNORED.search(stored) or (match and int(match[1]) >= layers):
                        continue
                    if self._table is not None and name in (_EMBEDDING, _HEAD):
                        value = _some_rows(source.get_slice(stored), self._table)
                    else:
                        value = source.get_tensor(stored)
                    found[name] = value.to(self._dtype)
        return found

    def weights(
        self, wanted: Callable[[str], bool], table_rows: Sequence[int]
    ) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """Tensors of the files as float32.

        Args:
            wanted: Which, by their names in the text network.
            table_rows: The rows of embedding and head that are taken; they can be very long.
        """
        found: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
        for path in self._described.weight_files:
            with safe_open(path, framework="pt", device="cpu") as source:
                for stored in source.keys():  # noqa: SIM118 - no mapping
                    name = _text_name(stored)
                    if IGNORED.search(stored) or not wanted(name):
                        continue
                    if name in (_EMBEDDING, _HEAD):
                        value = _some_rows(source.get_slice(stored), table_rows)
                    else:
                        value = source.get_tensor(stored)
                    found[name] = value.float().numpy()
        return found


def load_tokenizer(folder: DescribedFolder) -> Any:  # noqa: ANN401
    """The folder's tokenizer. Nothing of its own code is run, and nothing is downloaded.

    Raises:
        ModelFolderError: It cannot be used.
    """
    try:
        return AutoTokenizer.from_pretrained(
            folder.folder, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, TypeError, LookupError, OSError, RuntimeError, ImportError) as error:
        line = " ".join(str(error).split())[:200]
        raise ModelFolderError(f"{folder.folder}: tokenizer: {line}") from error


def _some_rows(table: Any, rows: Sequence[int]) -> Any:  # noqa: ANN401
    return torch.cat([table[row : row + 1] for row in rows])


def _text_name(stored: str) -> str:
    """A tensor's name within the text network, whatever it is part of in the file."""
    for prefix in (*TEXT_PREFIXES, "model."):
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return (
        "lm_head." + stored.removeprefix(HEAD_PREFIX) if stored.startswith(HEAD_PREFIX) else stored
    )


def _require_names(expected: set[str], found: set[str]) -> None:
    for name in sorted(expected - found):
        raise ModelFolderError(f"{name}: expected a tensor, as transformers has one, found nothing")
    for name in sorted(found - expected):
        raise ModelFolderError(f"{name}: expected no such tensor, as transformers has none")


def versions() -> Mapping[str, str]:
    """What computes here, for a report."""
    return {
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
    }
