"""A folder's text network, loaded and called by transformers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from engine.described import DescribedFolder
from engine.encodings import dtype_name
from engine.errors import ModelFolderError
from node.errors import UsageError
from node.produce.network.rows import DTYPES, HostRows, Rows
from node.produce.network.weights import (
    EMBEDDING,
    HEAD,
    float_tensors,
    read_tensors,
    require_names,
)
from node.produce.shapes import require_one_shape

#: Raised whenever this file's own call shapes change bits.
REVISION: Final = "torch-1"

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
        require_one_shape(described.layout)
        self._placing, self._table = placing, table
        self.device = placing.found()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False
        self._described = described
        self.layout = described.layout
        self._dtype = DTYPES[self.layout.encoding]
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
        """One call: the rows of ``token_ids`` into ``rows``; activations after the last token.

        They count from :meth:`Rows.end` on. Until then the call can be given up.
        """
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

    def give_up(self, rows: Rows) -> None:
        """A call failed: give back what was asked for on its behalf, as far as that is possible."""
        # What fails here has failed before, and was said.
        with contextlib.suppress(RuntimeError):
            rows.undo()
        self.tidy()

    def tidy(self) -> None:
        """Let nothing be reserved that nobody uses."""
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

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
        tensors = read_tensors(self._described, self.device, self._dtype, self._table)
        head = tensors.pop(HEAD, None)
        if head is None or self._described.fields.get("tie_word_embeddings"):
            head = tensors.get(EMBEDDING)
        require_names(set(network.state_dict()), set(tensors))
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

    def weights(
        self, wanted: Callable[[str], bool], table_rows: Sequence[int]
    ) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """Tensors of the files as float32.

        Args:
            wanted: Which, by their names in the text network.
            table_rows: The rows of embedding and head that are taken; they can be very long.
        """
        return float_tensors(self._described, wanted, table_rows)


def versions() -> Mapping[str, str]:
    """What computes here, for a report."""
    return {
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
    }
