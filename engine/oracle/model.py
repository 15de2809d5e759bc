"""The oracle: a model with its weights, and sessions that keep the whole history.

This is the reference the engine is measured against. It shares no code with MLX or mlx-lm, has no
ring, no staging and no kernel choice, and is written for being read, not for speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from engine.oracle.architectures import BUILDERS
from engine.oracle.config import Dialect, ModelConfig
from engine.oracle.decoder import Decoder
from engine.oracle.errors import OracleModelError
from engine.oracle.operators import Floats
from engine.oracle.plane import HistoryPlane, empty_plane
from engine.oracle.weights import Weights
from kvpack import limits
from kvpack.layout import CacheLayout, Encoding


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class OracleModel:
    """A decoder with its weights; holds no session state.

    Attributes:
        decoder: The math.
        max_context_tokens: Tokens that a session may hold.
    """

    decoder: Decoder
    max_context_tokens: int

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return self.decoder.vocab_size

    def layout(self) -> CacheLayout:
        """The layout of this model's snapshots: an engine's layout, but float32.

        Raises:
            LimitError: A float32 row is wider than a chunk may be; such a model still computes, but
                its snapshots cannot be packed.
        """
        return CacheLayout(self.decoder.layer_layouts(), Encoding.F32LE, self.max_context_tokens)

    def new_session(self) -> OracleSession:
        """A session at position 0."""
        return OracleSession(self)


def build_oracle(
    config: Mapping[str, object],
    tensors: Mapping[str, Floats],
    dialect: Dialect = Dialect.MLX_LM,
) -> OracleModel:
    """The oracle for a model folder's config and weights.

    Args:
        config: ``config.json`` as parsed.
        tensors: Every tensor of the folder by name, as float32, not quantised.
        dialect: Which reference to follow where mlx-lm and transformers disagree.

    Raises:
        OracleModelError: An unknown ``model_type``, or a field or tensor that is missing, has
            another shape, or asks for math that the oracle does not do.
    """
    fields = ModelConfig.flattened(config, dialect)
    model_type = fields.values.get("model_type")
    build = BUILDERS.get(model_type) if isinstance(model_type, str) else None
    if build is None:
        raise OracleModelError("model_type", " or ".join(sorted(BUILDERS)), model_type)
    fields.require_absent("partial_rotary_factor", 1.0)
    weights = Weights(tensors)
    decoder = build(fields, weights)
    weights.require_all_used()
    return OracleModel(decoder, _context_tokens(fields))


def _context_tokens(fields: ModelConfig) -> int:
    """The longest context, under either of the two names it has in config files."""
    if fields.has("max_position_embeddings"):
        return fields.integer("max_position_embeddings")
    return fields.integer("model_max_length")


class OracleSession:
    """One token history and every key and value computed for it.

    Args:
        model: The model.
        token_ids: Tokens that ``planes`` already hold.
        planes: One per layer, ending at ``len(token_ids)``; None for a fresh session.
    """

    def __init__(
        self,
        model: OracleModel,
        token_ids: Sequence[int] = (),
        planes: Sequence[HistoryPlane] | None = None,
    ) -> None:
        self._model = model
        self._token_ids = list(token_ids)
        self._planes = list(planes) if planes is not None else _empty_planes(model)

    def __repr__(self) -> str:
        return f"OracleSession(position={self.position})"

    @property
    def model(self) -> OracleModel:
        """The session's model."""
        return self._model

    @property
    def position(self) -> int:
        """Tokens computed so far; also the next position."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens computed so far. They are the user's text."""
        return tuple(self._token_ids)

    def append(self, token_ids: Sequence[int]) -> Floats:
        """Compute the next tokens; returns logits ``[len(token_ids), vocab_size]``.

        Row i belongs to position ``position + i`` and predicts the token after it. Any number of
        tokens may be given; a call that fails leaves the session as it was.

        Raises:
            LimitError: No token, an id outside the vocabulary, or more than the context holds.
        """
        return self._model.decoder.head(self._advance(token_ids))

    def prefill(self, token_ids: Sequence[int]) -> None:
        """As :meth:`append`, without the logits: the rows alone."""
        self._advance(token_ids)

    def rows(self, layer: int, first: int, end: int) -> tuple[Floats, Floats]:
        """Keys and values of ``layer`` at positions ``[first, end)``, ``[rows, kv_heads, dim]``.

        Raises:
            ValueError: A position is not held.
        """
        keys, values = self._planes[layer].rows(first, end)
        return keys.copy(), values.copy()

    def _advance(self, token_ids: Sequence[int]) -> Floats:
        ids = [int(token) for token in token_ids]
        free = self._model.max_context_tokens - self.position
        limits.check_range("token_ids", len(ids), 1, free, "tokens")
        limits.check_range("token_ids.min", min(ids), 0, self._model.vocab_size - 1)
        limits.check_range("token_ids.max", max(ids), 0, self._model.vocab_size - 1)
        h = self._model.decoder.forward(ids, self._planes, self.position)
        self._token_ids.extend(ids)
        return h


def _empty_planes(model: OracleModel) -> list[HistoryPlane]:
    return [
        empty_plane(shape.kv_heads, shape.key_dim, shape.value_dim)
        for shape in model.decoder.layer_layouts()
    ]
