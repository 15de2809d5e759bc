"""The result of a move as a message, and as JSON."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict

from kvpack.chunk import ChunkClass
from node.migration.orders import Moved
from node.migration.wire import token_value
from node.pb.v1 import migration_pb2, session_pb2


def result_message(moved: Moved) -> session_pb2.MigrateResult:
    """What ``Session.Migrate`` sends last."""
    order, timeline, reply = moved.order, moved.timeline, moved.reply
    rows = (ChunkClass.FULL, ChunkClass.SWA, ChunkClass.TOKEN_IDS)
    exact = reply.continuation == migration_pb2.CONTINUATION_EXACT
    zero = timeline.zero_s
    return session_pb2.MigrateResult(
        target_node=order.target,
        token=reply.token,
        first_token=reply.first_token,
        first_index=reply.first_index,
        state_verdict="exact",
        continuation_verdict="exact" if exact else "compatible",
        drift=reply.drift,
        nope_bytes=timeline.bytes_of(ChunkClass.FULL),
        swa_bytes=timeline.bytes_of(ChunkClass.SWA),
        token_bytes=timeline.bytes_of(ChunkClass.TOKEN_IDS),
        session_bytes=timeline.payload_bytes - timeline.bytes_of(*rows),
        payload_bytes=timeline.payload_bytes,
        wire_bytes=moved.wire_bytes,
        payload_bytes_after_zero=timeline.payload_bytes_after_zero,
        hidden_fraction=timeline.hidden_fraction,
        prefill_s=timeline.zero_s - timeline.start_s,
        exposed_handover_s=timeline.exposed_handover_s,
        objects=moved.objects,
        session_id=order.copy_as or moved.session_id,
        position=moved.position,
        held_bytes=timeline.held_bytes,
        resumed=timeline.resumed,
        data_plane=moved.data_plane.value,
        plane_fallback=moved.plane_fallback,
        phases=session_pb2.HandoverPhases(
            boundary_s=timeline.boundary_s - zero,
            pushed_s=timeline.pushed_s - zero,
            sealed_s=timeline.sealed_s - zero,
            committed_s=timeline.committed_s - zero,
            target_probe_s=timeline.target.probe_s,
            target_durable_s=timeline.target.durable_s,
            target_transfer_s=timeline.target.transfer_s,
            target_swap_s=timeline.target.swap_s,
        ),
    )


def as_object(result: session_pb2.MigrateResult) -> dict[str, Any]:
    """The result as one JSON object: snake_case, numbers as numbers, the token by its parts."""
    found = MessageToDict(
        result, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for field in result.DESCRIPTOR.fields:
        if field.cpp_type in (field.CPPTYPE_UINT64, field.CPPTYPE_INT64):
            found[field.name] = int(found[field.name])
    token = token_value(result.token)
    found["token"] = {
        "directory_id": token.directory_id.hex(),
        "generation": token.generation,
        "revision": token.revision,
    }
    return found
