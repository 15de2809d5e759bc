"""What can go wrong in the engine, as part of the one error tree.

Messages name layers, positions and files, never tokens, text or tensor bytes.
"""

from __future__ import annotations

from kvpack.errors import KvpackError


class ModelFolderError(KvpackError):
    """A model folder cannot be used: something is missing, damaged or not supported."""

    reason = "bad_model_folder"


class UnsupportedCacheError(ModelFolderError):
    """A layer keeps its state in a kind of cache that the planes cannot stand in for."""

    reason = "unsupported_cache"

    def __init__(self, layer: int, kind: str) -> None:
        self.layer = layer
        self.kind = kind
        super().__init__(
            f"layers[{layer}]: cache kind {kind} is not supported (supported: "
            "full KVCache, RotatingKVCache that keeps no prefix)"
        )


class BackendError(KvpackError):
    """The process is set up so that results could not be repeated; nothing was loaded."""

    reason = "backend_not_repeatable"


class CacheDiscontinuity(KvpackError):
    """A row was offered for another position than the next one. Nothing was written.

    Attributes:
        layer: Index of the layer whose plane refused.
        expected: The next position, ``origin_logical + length``.
        got: The position that was offered.
    """

    reason = "cache_discontinuity"

    def __init__(self, layer: int, expected: int, got: int) -> None:
        self.layer = layer
        self.expected = expected
        self.got = got
        super().__init__(f"layers[{layer}]: expected position {expected}, got {got}")


class ContextLimitError(KvpackError):
    """More rows than the context holds. Nothing was written."""

    reason = "context_limit"

    def __init__(self, limit: int, asked: int) -> None:
        self.limit = limit
        self.asked = asked
        super().__init__(f"the context holds {limit} tokens; this call would make it {asked}")


class RowsNotLiveError(KvpackError):
    """Rows were asked for that the plane does not hold: overwritten, or not computed yet."""

    reason = "rows_not_live"

    def __init__(self, layer: int, live: tuple[int, int], asked: tuple[int, int]) -> None:
        self.layer = layer
        super().__init__(
            f"layers[{layer}]: rows [{live[0]}, {live[1]}) are live, "
            f"[{asked[0]}, {asked[1]}) was asked for"
        )


class TornGenerationError(KvpackError):
    """A forward call stopped half way, so the layers stand at different positions.

    The generation cannot be used again; every other one is untouched.
    """

    reason = "torn_generation"


class ChatTemplateError(KvpackError):
    """A conversation cannot be written in this model's form.

    Attributes:
        detail: The template's own words, for whoever sent the messages: they may quote them, so
            they stand in no log and not in ``str()``.
    """

    reason = "chat_template"

    def __init__(self, message: str, detail: str = "") -> None:
        self.detail = detail
        super().__init__(message)


class ToolCallError(KvpackError):
    """A part of an answer was marked as a tool call and is none that can be read."""

    reason = "no_tool_call"
