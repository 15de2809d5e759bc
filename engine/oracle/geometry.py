"""The sizes that every architecture has."""

from __future__ import annotations

from dataclasses import dataclass

from engine.oracle.config import ModelConfig
from engine.oracle.errors import OracleModelError


@dataclass(frozen=True, slots=True)
class Geometry:
    """Widths and counts of one model.

    Attributes:
        hidden: Width of the activations.
        layers: Number of layers.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Elements per head.
        vocab: Entries of the vocabulary.

    Raises:
        OracleModelError: The query heads are not a multiple of the key/value heads, or a head has
            an odd number of elements.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise OracleModelError(
                "num_key_value_heads", f"a divisor of {self.heads}", self.kv_heads
            )
        if self.head_dim % 2:
            raise OracleModelError("head_dim", "an even number", self.head_dim)

    @classmethod
    def read(
        cls, config: ModelConfig, head_dim: int | None = None, kv_heads: int | None = None
    ) -> Geometry:
        """The sizes in ``config``; ``head_dim`` and ``kv_heads`` are defaults for their fields."""
        return cls(
            config.integer("hidden_size"),
            config.integer("num_hidden_layers"),
            config.integer("num_attention_heads"),
            config.integer("num_key_value_heads", kv_heads),
            config.integer("head_dim", head_dim),
            config.integer("vocab_size"),
        )

    @property
    def query_width(self) -> int:
        """Elements of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of all key heads together."""
        return self.kv_heads * self.head_dim
