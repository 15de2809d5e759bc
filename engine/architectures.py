"""The architectures this engine loads, and what mlx-lm's code for each assumes.

A config says more than mlx-lm reads. Where it asks for math that mlx-lm does not do, loading is
refused: rows computed under another reading of the config would be exact copies of wrong rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Names of layer kinds in configs.
SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"

#: RoPE scaling rules under which an angle depends on the position alone.
ROPE_RULES: Final = ("default", "linear", "llama3", "yarn")

#: Values of a setting that mlx-lm does not read and under which it is right nevertheless.
Harmless = tuple[object, ...]

_SILU: Final[Mapping[str, Harmless]] = {"hidden_act": ("silu",)}
_GEMMA3: Final[Mapping[str, Harmless]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one ``model_type`` needs to be known by.

    Attributes:
        rope_flag: Attribute of an attention module that says whether its ``rope`` is applied; None
            where every layer rotates its keys.
        needs: Layer kinds of which mlx-lm's code needs at least one each.
        harmless: Settings that mlx-lm does not read, each with the values under which that changes
            nothing; absent and null are always harmless.
        default_context_tokens: The published reference's ``max_position_embeddings`` where configs
            leave it out; None where they never do.
    """

    rope_flag: str | None = None
    needs: tuple[str, ...] = ()
    harmless: Mapping[str, Harmless] = field(default_factory=dict)
    default_context_tokens: int | None = None


#: By ``model_type``. Three sliding layers with RoPE to a full one without; then hybrids whose full
#: layers rotate their keys, too; then plain models.
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "muse_glimmer": Architecture("use_rope", harmless={"hidden_activation": ("silu",)}),
    "cohere2": Architecture(
        "use_sliding_window",
        harmless={**_SILU, "rope_scaling": (), "tie_word_embeddings": (True,)},
    ),
    "exaone4": Architecture("use_rope", harmless=_SILU),
    "afmoe": Architecture(
        "is_local_attention", needs=(FULL,), harmless={**_SILU, "attention_bias": (False,)}
    ),
    "gemma3": Architecture(harmless=_GEMMA3, default_context_tokens=131_072),
    "gemma3_text": Architecture(harmless=_GEMMA3, default_context_tokens=131_072),
    "gpt_oss": Architecture(
        needs=(SLIDING, FULL),
        harmless={
            **_SILU,
            "attention_bias": (True,),
            "tie_word_embeddings": (False,),
            "swiglu_alpha": (1.702,),
            "swiglu_limit": (7.0,),
        },
    ),
    "olmo3": Architecture(needs=(SLIDING, FULL), harmless=_SILU),
    "llama": Architecture(needs=(FULL,), harmless=_SILU),
}
