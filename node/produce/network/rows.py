"""Rows as torch keeps them, and their way to the host.

transformers' own cache keeps ``window - 1`` rows of a sliding layer after a call, which is all that
its next call reads; a cut holds ``window`` of them. It joins old and new rows into fresh memory at
every call, head by head. So the rows are kept here: one buffer for all layers of a shape, token by
token as a tile holds them, into which every layer writes its new rows and out of which attention
reads a view. The rows of a tile then lie as its bytes have to, and leave a GPU by one gathering and
one copy into pinned memory.

*A window's buffer* is longer than the window: rows are appended until it is full, then the last
window moves to its front. So rows of a window always lie in one piece, oldest first, and those of a
cut stay until the call after it.

*A call that fails* has appended nothing: its rows lie behind those that count, and the next call
writes over them. What it made a buffer longer by is given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvpack.errors import LayoutMismatchError
from kvpack.layout import CacheLayout, Encoding, LayerLayout
from kvpack.snapshot import TileSpec

#: Rows that a full layer's buffer begins with, and what a window's is longer than two windows by.
_FIRST_ROWS: Final = 2048
_SPARE_ROWS: Final = 512

DTYPES: Final[Mapping[Encoding, Any]] = {
    Encoding.F16LE: torch.float16,
    Encoding.BF16LE: torch.bfloat16,
    Encoding.F32LE: torch.float32,
}


class HostRows:
    """Rows on their way to the host."""

    __slots__ = ("_event", "_rows")

    def __init__(self, rows: Any, event: Any) -> None:  # noqa: ANN401 - torch is not typed here
        self._rows, self._event = rows, event

    def take(self) -> memoryview:
        """Their bytes, once all are there; nobody writes to them."""
        if self._event is not None:
            self._event.synchronize()
        host = self._rows.reshape(-1).view(torch.uint8).numpy()
        host.flags.writeable = False
        view: memoryview = host.data
        return view


class _Bank:
    """Rows of all layers of one shape.

    Attributes:
        layers: Which, ascending.
        rows: ``[layers, keys and values, capacity, kv_heads, dim]``.
        origin: Position of the first row in it.
        position: Where the call under way began; rows before it are whole.
    """

    def __init__(self, layers: Sequence[int], shape: LayerLayout, dtype: Any, device: Any) -> None:  # noqa: ANN401
        self.layers = tuple(layers)
        self.window = shape.window_tokens
        self._shape = (shape.kv_heads, shape.key_dim)
        self._made = {"dtype": dtype, "device": device}
        self.origin = self.position = 0
        self._settled = _FIRST_ROWS if self.window is None else 2 * self.window + _SPARE_ROWS
        self.rows = self._empty(self._settled)

    @property
    def capacity(self) -> int:
        """Rows of each layer that it has memory for."""
        return int(self.rows.shape[2])

    def begin(self, count: int) -> None:
        """Make room for a call of ``count`` tokens. Where that fails nothing has changed."""
        kept, slot = self._kept(), self.position - self.origin
        if slot + count <= self.capacity:
            return
        if kept + count > self.capacity:
            self._move_to(self._empty(max(2 * self.capacity, kept + count)))
        else:
            # They move within one buffer: source and destination may overlap.
            old = self.rows[:, :, slot - kept : slot].clone()
            self.rows[:, :, :kept].copy_(old)
            self.origin = self.position - kept

    def end(self, position: int) -> None:
        """Rows before ``position`` are whole."""
        self.position, self._settled = position, self.capacity

    def undo(self) -> None:
        """Give back what the call that failed has made it longer by."""
        if self.capacity != self._settled:
            self._move_to(self._empty(self._settled))

    def append(self, index: int, keys: Any, values: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Keep a layer's new rows ``[1, kv_heads, count, dim]``; all that its queries may see."""
        slot = self.position - self.origin
        end = slot + keys.shape[2]
        rows = self.rows[index]
        if keys.dtype != rows.dtype:
            raise RuntimeError(f"keys of {keys.dtype} where rows are of {rows.dtype}")
        rows[0, slot:end].copy_(keys[0].transpose(0, 1))
        rows[1, slot:end].copy_(values[0].transpose(0, 1))
        seen = rows[:, slot - self.past() : end].transpose(1, 2)
        return seen[0][None], seen[1][None]

    def past(self) -> int:
        """Rows before the call under way that its first query may see."""
        return self.position if self.window is None else min(self.position, self.window - 1)

    def part(self, spec: TileSpec) -> Any:  # noqa: ANN401
        """A view of a tile's rows, ``[layers, keys and values, count, kv_heads, dim]``.

        A view alone: what indexing would gather were memory of the stream that computes, and could
        be used anew there while the copy on another stream still reads it.
        """
        first = self.layers.index(spec.layers[0])
        members = self.layers[first : first + len(spec.layers)]
        if members != spec.layers:
            raise LayoutMismatchError("tile.layers", "neighbours of one kind", spec.layers)
        slot = spec.first_position - self.origin
        return self.rows[first : first + len(members), :, slot : slot + spec.token_count]

    def _kept(self) -> int:
        """Rows before the call under way that stay."""
        return self.position if self.window is None else min(self.position, self.window)

    def _move_to(self, rows: Any) -> None:  # noqa: ANN401
        """Keep the rows in ``rows`` from here on."""
        kept, slot = self._kept(), self.position - self.origin
        rows[:, :, :kept].copy_(self.rows[:, :, slot - kept : slot])
        self.rows, self.origin = rows, self.position - kept

    def _empty(self, capacity: int) -> Any:  # noqa: ANN401
        return torch.empty((len(self.layers), 2, capacity, *self._shape), **self._made)


def _kept_by(bank: _Bank, index: int) -> Any:  # noqa: ANN401
    """What transformers takes for a layer's cache: it writes into ``bank`` and reads out of it."""

    class _Kept(DynamicLayer if bank.window is None else DynamicSlidingWindowLayer):  # type: ignore[misc]
        def update(
            self,
            key_states: Any,  # noqa: ANN401
            value_states: Any,  # noqa: ANN401
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> tuple[Any, Any]:
            return bank.append(index, key_states, value_states)

        def get_seq_length(self) -> int:
            return bank.position

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            past = bank.past()
            return past + query_length, bank.position - past

    kept = _Kept() if bank.window is None else _Kept(sliding_window=bank.window)
    kept.is_initialized = True
    return kept


class Rows:
    """The rows of one session, on the network's device.

    Args:
        layout: Their shape; all layers of a kind alike (:mod:`node.produce.shapes`).
        device: Where they are.
        copies: The CUDA stream on which they leave; None on a CPU.

    Attributes:
        cache: What the network is called with.
        position: Tokens whose rows are whole.
    """

    def __init__(self, layout: CacheLayout, device: Any, copies: Any) -> None:  # noqa: ANN401
        shapes: dict[LayerLayout, list[int]] = {}
        for index, layer in enumerate(layout.layers):
            shapes.setdefault(layer, []).append(index)
        dtype = DTYPES[layout.encoding]
        self._banks = [_Bank(members, shape, dtype, device) for shape, members in shapes.items()]
        self._copies = copies
        self.position = 0
        by_layer = sorted((layer, bank) for bank in self._banks for layer in bank.layers)
        self._of = dict(by_layer)
        self.cache = Cache(
            layers=[_kept_by(bank, bank.layers.index(layer)) for layer, bank in self._of.items()]
        )

    @property
    def capacities(self) -> tuple[int, ...]:
        """Rows of each layer that there is memory for, by shape."""
        return tuple(bank.capacity for bank in self._banks)

    def begin(self, count: int) -> None:
        """Make room for a call of ``count`` tokens; rows on their way to the host stay readable."""
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)
        for bank in self._banks:
            bank.begin(count)

    def end(self, count: int) -> None:
        """The call's rows are whole."""
        self.position += count
        for bank in self._banks:
            bank.end(self.position)

    def undo(self) -> None:
        """The call failed: be as long as before it. The rows that count are where they were."""
        for bank in self._banks:
            bank.undo()

    def to_host(self, spec: TileSpec) -> HostRows:
        """Begin to bring a tile's rows to the host. On a GPU this does not wait for them.

        Raises:
            LayoutMismatchError: Its layers are not neighbours of one kind.
        """
        source = self._of[spec.layers[0]].part(spec)
        if self._copies is None:
            return HostRows(source.clone(memory_format=torch.contiguous_format), None)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            # Gathered on the device where it does not lie in one piece, then one copy.
            host.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return HostRows(host, event)
