"""A model folder, described without MLX: identity and layout as the loaded model would state them.

For whoever computes a folder's rows by other means. Nothing is computed and no weight is read but
for its digest; whether the rows that come of it are those of this description is for a check to
find out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from engine import config_checks, config_rope
from engine.architectures import ARCHITECTURES
from engine.arguments import WRITTEN_DOWN, Arguments, arguments_from, layout_from
from engine.config_checks import Fields
from engine.encodings import encoding_named
from engine.errors import ModelFolderError
from engine.folder import find_folder, require_files
from engine.folder_checks import require_config, require_weights
from engine.identity import identity_of, quantisation_text, read_json_object
from engine.weight_headers import read_headers
from kvpack.identity import Identity
from kvpack.layout import CacheLayout, Encoding

_STATED: Final = {"F16": Encoding.F16LE, "BF16": Encoding.BF16LE, "F32": Encoding.F32LE}

#: The tensor whose type is that of the rows.
_KEYS: Final = "layers.0.self_attn.k_proj.weight"


@dataclass(frozen=True, slots=True)
class DescribedFolder:
    """What a folder says of the rows that are computed from it.

    Attributes:
        name: The folder's name; a label, never identity.
        folder: Where it is.
        weight_files: Its weights.
        fields: The language model's configuration.
        arguments: What a network is built from, by name.
        layout: Shape of the rows.
    """

    name: str
    folder: Path
    weight_files: tuple[Path, ...]
    fields: Fields = field(repr=False)
    arguments: Arguments = field(repr=False)
    layout: CacheLayout = field(repr=False)

    @property
    def architecture(self) -> str:
        """Its ``model_type``."""
        return str(self.fields["model_type"])

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.arguments["vocab_size"])

    def first_layers(self, count: int, vocab_size: int) -> DescribedFolder:
        """The same network, but its first ``count`` layers alone, in float32 and with few tokens.

        It has no identity of its own: it is there to be computed and looked at.
        """
        changes: Arguments = {"num_hidden_layers": count, "vocab_size": vocab_size}
        for name in ("layer_types", "layer_rope_theta"):
            if name in self.arguments:
                changes[name] = self.arguments[name][:count]
        layers = self.layout.layers[:count]
        return replace(
            self,
            arguments={**self.arguments, **changes},
            layout=CacheLayout(layers, Encoding.F32LE, self.layout.max_context_tokens),
        )

    def identity(self, chat_template: object) -> Identity:
        """As the loaded model states it, for a placeholder tenant.

        Args:
            chat_template: The template in force; None: none.

        Raises:
            ModelFolderError: The tokenizer's configuration is damaged.
            OSError: A file cannot be read.
        """
        return identity_of(
            self.folder, self.weight_files, self.fields, self.arguments, self.layout, chat_template
        )


def describe_folder(folder: Path | str, *, dtype: str | None = None) -> DescribedFolder:
    """Read what a folder says. Nothing is asked of any network.

    Args:
        folder: As for :func:`engine.load_model`.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"`` for rows of another type than the
            weights'; None keeps it.

    Raises:
        ModelFolderError: One line naming what is missing, damaged, contradictory, quantised or not
            written down.
        ValueError: ``dtype`` is not one of the three names.
    """
    found = find_folder(Path(folder))
    files = require_files(found.folder)
    config = read_json_object(found.folder / "config.json")
    if config.get("model_type") not in WRITTEN_DOWN:
        config_checks.refuse(
            "model_type", " or ".join(WRITTEN_DOWN), repr(config.get("model_type"))
        )
    architecture = ARCHITECTURES[config["model_type"]]
    fields = config_checks.text_fields(config)
    if (text := quantisation_text(fields)) != "none":
        config_checks.refuse("quantization", "none: weights as they were published", text)
    require_weights(found.folder, files, fields, chosen=dtype is not None)
    require_config(fields, architecture)
    arguments = arguments_from({**config, **config_rope.older_form(config)})
    encoding = encoding_named(dtype) if dtype is not None else _own_encoding(files)
    context_tokens = config_checks.max_context_tokens(fields, architecture)
    layout = layout_from(config, arguments, encoding, context_tokens)
    config_checks.require_windows(fields, [layer.window_tokens for layer in layout.layers])
    config_rope.require_rope(fields, layout)
    return DescribedFolder(found.name, found.folder, tuple(files), fields, arguments, layout)


def _own_encoding(files: list[Path]) -> Encoding:
    headers: dict[str, Any] = {**read_headers(files)}
    for name, header in headers.items():
        if name.endswith(_KEYS) and "vision" not in name and header.dtype in _STATED:
            return _STATED[header.dtype]
    raise ModelFolderError(f"{_KEYS}: expected F16, BF16 or F32, found nothing")
