"""What the tests of single architectures share: cases, edited folders, and the network inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_support import HEAD, TOKEN, ModelCase, write_model

from engine import Model

#: Architectures beside the four that the other engine tests cover.
ARCHES = ("gemma3", "gemma3_text", "gpt_oss", "olmo3", "llama")

#: Every dtype that this backend has for the architecture, and both plane layouts among them.
CASES = (
    ModelCase("gemma3_text", "float16", HEAD),
    ModelCase("gemma3_text", "bfloat16", TOKEN),
    ModelCase("gemma3", "bfloat16", HEAD),
    ModelCase("gpt_oss", None, HEAD),
    ModelCase("gpt_oss", None, TOKEN),
    ModelCase("olmo3", "float16", TOKEN),
    ModelCase("olmo3", "bfloat16", HEAD),
    ModelCase("llama", "float16", HEAD),
    ModelCase("llama", "bfloat16", TOKEN),
)


NULL = object()


def network_of(model: Model) -> Any:
    """The network behind a model: the loader's closure holds it."""
    return model._parts.call.__closure__[0].cell_contents


def edited(folder: Path, case: ModelCase, changes: Mapping[str, Any]) -> Path:
    """A folder of its own for ``case``, with these fields of the language model's config changed.

    None removes a field, :data:`NULL` makes it null.
    """
    write_model(folder, case)
    config = json.loads((folder / "config.json").read_text())
    fields = config.get("text_config", config)
    fields.update(changes)
    for name, value in changes.items():
        if value is None:
            del fields[name]
        elif value is NULL:
            fields[name] = None
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fields_of(folder: Path) -> dict[str, Any]:
    """The language model's fields of a folder's config."""
    config = json.loads((folder / "config.json").read_text())
    return {**config, **config.get("text_config", {})}


def label(case: ModelCase) -> str:
    return case.label


def positions(window: int) -> Sequence[int]:
    """One token, around the first wrap, around the second, and well past both."""
    around = range(window - 2, window + 3)
    return [1, *around, *range(2 * window - 1, 2 * window + 2), 5 * window + 3]
