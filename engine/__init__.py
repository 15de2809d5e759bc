"""MLX engine: planes with explicit origins, staging prefill, snapshot and install.

Importing this package is cheap and needs no MLX; the names below load it on first use. Every call
into a model belongs on one thread, because MLX binds its streams to the thread that made them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine import backend

if TYPE_CHECKING:
    from engine.chat import ParsedCall, ReplyMarks
    from engine.checkpoint import Checkpoint
    from engine.draft import ModelDraft, PromptLookup, check_draft
    from engine.draft_state import install_draft
    from engine.errors import (
        BackendError,
        CacheDiscontinuity,
        ChatTemplateError,
        ContextLimitError,
        ModelFolderError,
        RowsNotLiveError,
        ToolCallError,
        TornGenerationError,
        UnsupportedCacheError,
    )
    from engine.folder import find_folder
    from engine.generation import Generation
    from engine.install import Installer, MissingRows
    from engine.logits import Logits
    from engine.mlxlm import load_model
    from engine.model import Model
    from engine.observed import ObservedCall
    from engine.origins import PlaneLayout
    from engine.prefill import prefill_calls
    from engine.sampling import SamplingParameters
    from engine.sampling_state import SamplerState
    from engine.speculative import LivePair, Round, speculate, speculative_rounds
    from engine.speculative_report import Agreement, SpeculationCounts, plain_tokens
    from engine.stream import TextStream
    from engine.stream_state import DecodingState
    from engine.tiny import ARCHITECTURES, tiny_model_files

__all__ = [
    "find_folder",
    "load_model",
    "Model",
    "Generation",
    "Installer",
    "MissingRows",
    "Logits",
    "ObservedCall",
    "PlaneLayout",
    "prefill_calls",
    "tiny_model_files",
    "ARCHITECTURES",
    "Checkpoint",
    "ModelDraft",
    "PromptLookup",
    "check_draft",
    "install_draft",
    "SamplingParameters",
    "SamplerState",
    "LivePair",
    "Round",
    "speculate",
    "speculative_rounds",
    "Agreement",
    "SpeculationCounts",
    "plain_tokens",
    "TextStream",
    "DecodingState",
    "ParsedCall",
    "ReplyMarks",
    "BackendError",
    "CacheDiscontinuity",
    "ChatTemplateError",
    "ContextLimitError",
    "ModelFolderError",
    "RowsNotLiveError",
    "ToolCallError",
    "TornGenerationError",
    "UnsupportedCacheError",
]

_HOMES = {
    "find_folder": "folder",
    "load_model": "mlxlm",
    "Model": "model",
    "Generation": "generation",
    "Installer": "install",
    "MissingRows": "install",
    "Logits": "logits",
    "ObservedCall": "observed",
    "PlaneLayout": "origins",
    "prefill_calls": "prefill",
    "tiny_model_files": "tiny",
    "ARCHITECTURES": "tiny",
    "Checkpoint": "checkpoint",
    "ModelDraft": "draft",
    "PromptLookup": "draft",
    "check_draft": "draft",
    "install_draft": "draft_state",
    "SamplingParameters": "sampling",
    "SamplerState": "sampling_state",
    "LivePair": "speculative",
    "Round": "speculative",
    "speculate": "speculative",
    "speculative_rounds": "speculative",
    "Agreement": "speculative_report",
    "SpeculationCounts": "speculative_report",
    "plain_tokens": "speculative_report",
    "TextStream": "stream",
    "DecodingState": "stream_state",
    "ParsedCall": "chat",
    "ReplyMarks": "chat",
}

# Switches must be in place before anything imports MLX, and this file runs before every submodule.
backend.set_switches()


def __getattr__(name: str) -> Any:  # noqa: ANN401  the type depends on the name
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    home = importlib.import_module(f"engine.{_HOMES.get(name, 'errors')}")
    return getattr(home, name)
