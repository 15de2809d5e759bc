"""What the rows of a session take at any length: the two curves of a hybrid model."""

from __future__ import annotations

from dataclasses import dataclass

from kvpack.layout import CacheLayout, LayerKind


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """What the rows of one session take at any length, from the model's layout.

    Attributes:
        windows: ``(window_tokens, row_bytes)`` of each group of window layers, ascending.
        window_layers: Layers that see a window.
        full_row_bytes: Bytes of one token in all full layers.
        full_layers: Layers that see everything.
        full_is_nope: Whether none of them rotates its keys.
        context_tokens: The longest context.
    """

    windows: tuple[tuple[int, int], ...]
    window_layers: int
    full_row_bytes: int
    full_layers: int
    full_is_nope: bool
    context_tokens: int

    @classmethod
    def of(cls, layout: CacheLayout) -> MemoryShape:
        """The shape of ``layout``."""
        groups: dict[int, int] = {}
        for index in layout.layers_of(LayerKind.SWA):
            window = layout.layers[index].window_tokens or layout.max_context_tokens
            groups[window] = groups.get(window, 0) + layout.row_bytes(index)
        full = layout.layers_of(LayerKind.FULL)
        return cls(
            tuple(sorted(groups.items())), len(layout.layers) - len(full),
            sum(layout.row_bytes(index) for index in full), len(full),
            all(layout.layers[index].rope is None for index in full),
            layout.max_context_tokens,
        )  # fmt: skip

    def ring_bytes(self, position: int) -> int:
        """Bytes of all window layers after ``position`` tokens: flat from the window on."""
        return sum(min(position, window) * size for window, size in self.windows)

    def full_bytes(self, position: int) -> int:
        """Bytes of all full layers after ``position`` tokens: they grow with every token."""
        return position * self.full_row_bytes
