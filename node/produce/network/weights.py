"""What a model folder's files hold, as torch and the reference take it: tensors and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from engine.described import DescribedFolder
from engine.errors import ModelFolderError
from engine.oracle.weights import HEAD_PREFIX, IGNORED, TEXT_PREFIXES

EMBEDDING: Final = "embed_tokens.weight"
HEAD: Final = "lm_head.weight"

_LAYER: Final = re.compile(r"layers\.(\d+)\.")


def read_tensors(
    described: DescribedFolder,
    device: Any,  # noqa: ANN401 - torch is not typed here
    dtype: Any,  # noqa: ANN401
    table: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The text network's tensors, by their names in it.

    Args:
        described: The folder, or a part of it.
        device: Where to.
        dtype: As what.
        table: Rows of embedding and head that are taken; None: all.
    """
    found: dict[str, Any] = {}
    layers = len(described.layout.layers)
    for path in described.weight_files:
        with safe_open(path, framework="pt", device=str(device)) as source:
            for stored in source.keys():  # noqa: SIM118 - no mapping
                name = text_name(stored)
                match = _LAYER.match(name)
                if IGNORED.search(stored) or (match and int(match[1]) >= layers):
                    continue
                if table is not None and name in (EMBEDDING, HEAD):
                    value = _some_rows(source.get_slice(stored), table)
                else:
                    value = source.get_tensor(stored)
                found[name] = value.to(dtype)
    return found


def float_tensors(
    described: DescribedFolder, wanted: Callable[[str], bool], table_rows: Sequence[int]
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Tensors of the files as float32, on the host.

    Args:
        described: The folder.
        wanted: Which, by their names in the text network.
        table_rows: The rows of embedding and head that are taken; they can be very long.
    """
    found: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
    for path in described.weight_files:
        with safe_open(path, framework="pt", device="cpu") as source:
            for stored in source.keys():  # noqa: SIM118 - no mapping
                name = text_name(stored)
                if IGNORED.search(stored) or not wanted(name):
                    continue
                if name in (EMBEDDING, HEAD):
                    value = _some_rows(source.get_slice(stored), table_rows)
                else:
                    value = source.get_tensor(stored)
                found[name] = value.float().numpy()
    return found


def require_names(expected: set[str], found: set[str]) -> None:
    """Refuse tensors that are missing or too many.

    Raises:
        ModelFolderError: Names the first.
    """
    for name in sorted(expected - found):
        raise ModelFolderError(f"{name}: expected a tensor, as transformers has one, found nothing")
    for name in sorted(found - expected):
        raise ModelFolderError(f"{name}: expected no such tensor, as transformers has none")


def text_name(stored: str) -> str:
    """A tensor's name within the text network, whatever it is part of in the file."""
    for prefix in (*TEXT_PREFIXES, "model."):
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return (
        "lm_head." + stored.removeprefix(HEAD_PREFIX) if stored.startswith(HEAD_PREFIX) else stored
    )


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
