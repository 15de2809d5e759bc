"""What a model folder must hold, looked at before anything heavy is imported.

Importing mlx-lm and transformers costs seconds; a folder that lacks a file is refused without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from huggingface_hub import constants as hub_constants

from engine.errors import ModelFolderError
from engine.hub_cache import FoundModel, find_model

#: Files that define a tokenizer, apart from its configuration.
TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)


def find_folder(model: Path) -> FoundModel:
    """The folder that ``model`` means, with every kind of file that a model needs.

    Args:
        model: A folder, or ``owner/name[@revision]`` for the local Hugging Face cache.

    Raises:
        ModelFolderError: One line naming what is not there.
    """
    found = find_model(model, Path(hub_constants.HF_HUB_CACHE))
    require_files(found.folder)
    return found


def require_files(folder: Path) -> list[Path]:
    """The weight files, once everything that a model folder needs is there.

    Raises:
        ModelFolderError: Config, weights or tokenizer are missing.
    """
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder}: config.json is missing")
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise ModelFolderError(f"{folder}: weights (model*.safetensors) are missing")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFolderError(f"{folder}: a tokenizer (tokenizer.json) is missing")
    return found
