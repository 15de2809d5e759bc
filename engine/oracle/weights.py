"""Named weights, taken once each with the shape that the config implies.

Names are those of a model folder. The same model is published under several spellings (a text
tower inside a multimodal model, experts one by one or stacked); :func:`canonical` turns each into
one spelling, so that the architectures need to know only that one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from engine.oracle.errors import OracleModelError
from engine.oracle.operators import Doubles, Linear
from engine.oracle.tensors import Floats

#: Where a multimodal checkpoint keeps its language model, longest spelling first.
TEXT_PREFIXES: Final = ("language_model.model.", "model.language_model.")
HEAD_PREFIX: Final = "language_model.lm_head."

#: Parts of a checkpoint that never touch text logits.
IGNORED: Final = re.compile(
    r"^(model\.)?(vision_tower|vision_adapter|vision_projection|multi_modal_projector)\."
    r"|rotary_emb\.inv_freq$"
)
ONE_EXPERT: Final = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight$")


class Weights:
    """The tensors of one model, by canonical name.

    Args:
        tensors: Name to array, as read from the model folder.
    """

    def __init__(self, tensors: Mapping[str, Floats]) -> None:
        self._tensors = canonical(tensors)
        self._unused = set(self._tensors)

    def has(self, name: str) -> bool:
        """Whether the model has this tensor."""
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Floats:
        """The tensor ``name`` as float32.

        Raises:
            OracleModelError: It is missing, or has another shape.
        """
        found = self._tensors.get(name)
        if found is None:
            raise OracleModelError(name, f"a tensor of shape {list(shape)}", "nothing")
        if found.shape != shape:
            raise OracleModelError(name, f"shape {list(shape)}", list(found.shape))
        self._unused.discard(name)
        return found.astype(np.float32, copy=False)

    def vector(self, name: str, length: int) -> Doubles:
        """A vector as float64; the values are those of its float32."""
        return self.take(name, length).astype(np.float64)

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """The projection ``name`` with weight ``[outputs, inputs]`` and, if asked, a bias."""
        weight = self.take(f"{name}.weight", outputs, inputs).astype(np.float64)
        return Linear(weight, self.vector(f"{name}.bias", outputs) if bias else None)

    def drop(self, name: str) -> None:
        """Leave a tensor unused on purpose: a tied head that the file repeats."""
        self._unused.discard(name)

    def require_all_used(self) -> None:
        """Refuse a model that has more tensors than the architecture reads.

        An unread tensor (a bias, a scale of a quantised weight) means other math than ours.

        Raises:
            OracleModelError: Names the first unread tensor.
        """
        if self._unused:
            raise OracleModelError(min(self._unused), "no such tensor", "one the oracle cannot use")


def canonical(tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    """The text model's tensors in the one spelling that the architectures read.

    Raises:
        OracleModelError: Experts are numbered with a gap.
    """
    renamed = {_text_name(name): value for name, value in tensors.items()}
    kept = {name: value for name, value in renamed.items() if not IGNORED.search(name)}
    return _split_interleaved(_stack_experts(kept))


def _text_name(name: str) -> str:
    for prefix in TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    if name.startswith(HEAD_PREFIX):
        return "lm_head." + name.removeprefix(HEAD_PREFIX)
    return name


def _stack_experts(tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    """``experts.3.up_proj.weight`` and its like become one ``experts.up_proj.weight [E, …]``."""
    stacked: dict[str, Floats] = {}
    groups: dict[str, dict[int, Floats]] = {}
    for name, value in tensors.items():
        match = ONE_EXPERT.match(name)
        if match is None:
            stacked[name] = value
        else:
            groups.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = value
    for name, members in groups.items():
        if sorted(members) != list(range(len(members))):
            raise OracleModelError(name, "experts numbered from 0 without a gap", sorted(members))
        stacked[name] = np.stack([members[index] for index in range(len(members))])
    return stacked


def _split_interleaved(tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    """GPT-OSS as published: ``gate_up_proj [E, in, 2 x out]`` holds gate and up column by column.

    The result is ``gate_proj.weight`` and ``up_proj.weight``, ``[E, out, in]`` like every other
    projection, and ``down_proj`` turned the same way.
    """
    split: dict[str, Floats] = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            stem, columns = name.removesuffix("gate_up_proj"), value.swapaxes(1, 2)
            split[f"{stem}gate_proj.weight"] = columns[:, 0::2]
            split[f"{stem}up_proj.weight"] = columns[:, 1::2]
        elif name.endswith("experts.gate_up_proj_bias"):
            stem = name.removesuffix("gate_up_proj_bias")
            split[f"{stem}gate_proj.bias"] = value[:, 0::2]
            split[f"{stem}up_proj.bias"] = value[:, 1::2]
        elif name.endswith("experts.down_proj"):
            split[f"{name}.weight"] = value.swapaxes(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            split[name.removesuffix("_bias") + ".bias"] = value
        else:
            split[name] = value
    return split
