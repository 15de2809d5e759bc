"""A model's config.json as checked fields, read the way both published references read it.

A default is given only where both references give one: the same, or each dialect its own. Every
other field is required: an oracle that guesses is no witness.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from engine.oracle.errors import OracleModelError
from kvpack.layout import LayerKind

T = TypeVar("T")

#: Layer names of Hugging Face configs and what they mean here.
LAYER_KINDS: Final = {"sliding_attention": LayerKind.SWA, "full_attention": LayerKind.FULL}


class Dialect(enum.Enum):
    """Which published reference to follow in the few places where the two disagree.

    Each place is named where it is read. Everywhere else both dialects are one computation.
    """

    MLX_LM = "mlx-lm"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Typed access to the fields of a config; every error names its field.

    Attributes:
        values: The fields of the text model, as JSON gives them.
        dialect: The reference to follow where the references disagree.
    """

    values: Mapping[str, object]
    dialect: Dialect = Dialect.MLX_LM

    @classmethod
    def flattened(cls, values: Mapping[str, object], dialect: Dialect) -> ModelConfig:
        """The text model's fields; a ``text_config`` inside a multimodal config wins over it."""
        inner = values.get("text_config")
        if inner is None:
            return cls(values, dialect)
        if not isinstance(inner, Mapping):
            raise OracleModelError("text_config", "an object", type(inner).__name__)
        return cls({**values, **inner}, dialect)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            OracleModelError: The field is missing without a default, or is not a positive integer.
        """
        value = self._given(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OracleModelError(name, "a positive integer", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number.

        Raises:
            OracleModelError: The field is missing without a default, or is not a finite number.
        """
        value = self._given(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise OracleModelError(name, "a number", value)
        if not abs(value) < float("inf"):
            raise OracleModelError(name, "a finite number", value)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false.

        Raises:
            OracleModelError: The field is missing without a default, or is not a boolean.
        """
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise OracleModelError(name, "true or false", value)
        return value

    def either(self, mlx_lm: T, transformers: T) -> T:
        """The default of the dialect's reference, for a field that the two fill in differently."""
        return mlx_lm if self.dialect is Dialect.MLX_LM else transformers

    def mapping(self, name: str) -> Mapping[str, object] | None:
        """An object, or None where the field is missing or null.

        Raises:
            OracleModelError: The field is something else.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise OracleModelError(name, "an object", type(value).__name__)
        return value

    def require_absent(self, name: str, *harmless: object) -> None:
        """Refuse a field that asks for math the oracle does not do.

        Raises:
            OracleModelError: The field is present, not null and not one of ``harmless``.
        """
        if self.has(name) and self.values[name] not in harmless:
            raise OracleModelError(name, "absent, null" + _or(harmless), self.values[name])

    def layer_kinds(self) -> tuple[LayerKind, ...] | None:
        """The kinds in ``layer_types``, one per layer, or None where the field is missing.

        Raises:
            OracleModelError: Another number of names than layers, or an unknown name.
        """
        names = self.values.get("layer_types")
        if names is None:
            return None
        count = self.integer("num_hidden_layers")
        if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != count:
            found = len(names) if isinstance(names, Sequence) else type(names).__name__
            raise OracleModelError("layer_types", f"{count} names", found)
        for index, name in enumerate(names):
            if name not in LAYER_KINDS:
                raise OracleModelError(f"layer_types[{index}]", " or ".join(LAYER_KINDS), name)
        return tuple(LAYER_KINDS[name] for name in names)

    def window(self, kind: LayerKind) -> int | None:
        """``sliding_window`` for a sliding layer, None for a full one.

        Raises:
            OracleModelError: The layer slides and the field is missing.
        """
        return self.integer("sliding_window") if kind is LayerKind.SWA else None

    def _given(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise OracleModelError(name, "a value", "nothing")
        return default


def every_nth_full(count: int, period: int) -> tuple[LayerKind, ...]:
    """``period - 1`` sliding layers, then a full one, and so on for ``count`` layers."""
    return tuple(
        LayerKind.FULL if (index + 1) % period == 0 else LayerKind.SWA for index in range(count)
    )


def _or(harmless: Sequence[object]) -> str:
    return "".join(f" or {value}" for value in harmless)
