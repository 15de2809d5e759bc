"""A draft's cache as one byte string, to travel as a component beside its target's.

The target's rows travel as tiles on the grid, because they are many and are shared. A draft's are
few and belong to nobody else, so they are one payload. Its tokens are the target's and are not
repeated; whose model it was stands in the pack's component.
"""

from __future__ import annotations

from typing import Final

from engine.generation import Generation
from engine.model import Model
from engine.sampling_record import RecordReader, RecordWriter
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallRun, CallSchedule
from kvpack.limits import CHUNK_PLAINTEXT_BYTES_MAX, PART_MAX, SCHEDULE_RUNS_MAX
from kvpack.snapshot import Tile, cut_tile_specs

_MAGIC: Final = b"kvDR"
_VERSION: Final = 1

#: What a component's pieces can hold together.
_ROWS_BYTES_MAX: Final = (PART_MAX + 1) * CHUNK_PLAINTEXT_BYTES_MAX


def encode_draft(draft: Generation) -> bytes:
    """A record ``kvDR`` version 1: the schedule's runs (call_tokens, calls, dropped_tokens), then
    the rows of the whole cut, tile after tile in the order of ``cut_tile_specs``.

    Raises:
        RuntimeError: A checkpoint is open.
        TornGenerationError: An earlier call stopped half way.
    """
    record = RecordWriter(_MAGIC, _VERSION).u32(len(draft.schedule.runs))
    for run in draft.schedule.runs:
        record.u32(run.call_tokens).u32(run.calls).u32(run.dropped_tokens)
    specs = cut_tile_specs(draft.layout, draft.position)
    record.blob(b"".join(draft.read_tile(spec).data for spec in specs))
    return record.finish()


def install_draft(model: Model, data: bytes, position: int) -> Generation:
    """The detached draft that :func:`encode_draft` wrote, for a target at ``position``.

    Raises:
        FormatError: ``data`` is no such record.
        LimitError: A field is outside its cap.
        LayoutMismatchError: The draft stood elsewhere, or the rows are not this model's.
    """
    record = RecordReader(data, _MAGIC, _VERSION, "draft")
    runs = record.many(
        "schedule",
        SCHEDULE_RUNS_MAX,
        lambda: CallRun(
            record.u32("call_tokens"), record.u32("calls"), record.u32("dropped_tokens")
        ),
    )
    rows = memoryview(record.blob("rows", _ROWS_BYTES_MAX))
    record.finish()
    schedule = CallSchedule(runs)
    if schedule.position != position:
        raise LayoutMismatchError("draft.position", position, schedule.position)
    specs = cut_tile_specs(model.layout, position)
    sizes = [spec.data_bytes(model.layout) for spec in specs]
    if sum(sizes) != len(rows):
        raise LayoutMismatchError("draft.rows", f"{sum(sizes)} bytes", f"{len(rows)} bytes")
    installer, offset = model.installer(position), 0
    for spec, size in zip(specs, sizes, strict=True):
        installer.scatter(Tile(spec, rows[offset : offset + size]))
        offset += size
    return installer.finish(schedule)
