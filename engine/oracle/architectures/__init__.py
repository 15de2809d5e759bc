"""The architectures the oracle knows, by the ``model_type`` of their configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.oracle.architectures import (
    afmoe,
    cohere2,
    exaone4,
    gemma3,
    gpt_oss,
    llama,
    muse_glimmer,
    olmo3,
)
from engine.oracle.config import ModelConfig
from engine.oracle.decoder import Decoder
from engine.oracle.weights import Weights

BUILDERS: Final[dict[str, Callable[[ModelConfig, Weights], Decoder]]] = {
    "afmoe": afmoe.build,
    "cohere2": cohere2.build,
    "exaone4": exaone4.build,
    "gemma3": gemma3.build,
    "gemma3_text": gemma3.build,
    "gpt_oss": gpt_oss.build,
    "llama": llama.build,
    "muse_glimmer": muse_glimmer.build,
    "muse_glimmer_text": muse_glimmer.build,
    "olmo3": olmo3.build,
}
