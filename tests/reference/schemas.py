"""The tables of sections 3 and 6."""

from __future__ import annotations

import itertools
from typing import Any

from tests.reference.ranges import check_range
from tests.reference.scan import DIGEST, FIXED64, MESSAGE, NUMBER, PACKED, TEXT, Field, Schema
from tests.reference.verdict import cap, need

Values = dict[str, Any]
POSITION = 16_777_216
EPOCH = 2**31 - 1
CHUNK = 4_194_304
ELEMENT_BYTES = {1: 2, 2: 2, 3: 4}


def _rope(value: Values, stage: str) -> None:
    need(value["dims"] >= 2, stage, "dims is below 2")


def _layer(value: Values, stage: str) -> None:
    need((value["kind"] == 1) == (value["window_tokens"] > 0), stage, "window without swa")
    if value["rope"] is not None:
        need(value["rope"]["dims"] <= value["key_dim"], stage, "dims above key_dim")


def _layout(value: Values, stage: str) -> None:
    for layer in value["layers"]:
        row = layer["kv_heads"] * (layer["key_dim"] + layer["value_dim"])
        cap(row * ELEMENT_BYTES[value["encoding"]], 16_384, stage, "bytes of a row")


def _ascending(names: list[str], stage: str) -> None:
    need(all(a < b for a, b in itertools.pairwise(names)), stage, "names not ascending")


def _identity(value: Values, stage: str) -> None:
    _ascending([item["name"] for item in value["constants"]], stage)


def _numerics(value: Values, stage: str) -> None:
    _ascending([item["name"] for item in value["values"]], stage)


def _run(value: Values, stage: str) -> None:
    dropped = value["dropped_tokens"]
    need(dropped < value["call_tokens"], stage, "a call keeps nothing")
    need(dropped == 0 or value["call_tokens"] <= 16, stage, "a long call dropped rows")


def schedule_position(schedule: Values) -> int:
    """Tokens that the calls of a schedule leave."""
    return sum((r["call_tokens"] - r["dropped_tokens"]) * r["calls"] for r in schedule["runs"])


def _parent(value: Values, stage: str) -> None:
    need(value["position"] % 256 == 0, stage, "the parent is no cut of the grid")


def _component(value: Values, stage: str) -> None:
    need((value["kind"] == 2) == (value["draft"] is not None), stage, "a draft model")


def _reference(value: Values, stage: str) -> None:
    need(value["plain_bytes"] > 0, stage, "plain_bytes")
    check_range(value, stage)


_ROPE = Schema(
    "RopeLayout",
    {
        1: Field("theta_bits", FIXED64),
        2: Field("dims", NUMBER, True, most=4096),
        3: Field("pairing", NUMBER, True, codes=2),
        4: Field("scaling", TEXT, True),
    },
    320,
    _rope,
)
_LAYER = Schema(
    "LayerLayout",
    {
        1: Field("kind", NUMBER, True, codes=2),
        2: Field("window_tokens", NUMBER, most=POSITION),
        3: Field("kv_heads", NUMBER, True, most=1024),
        4: Field("key_dim", NUMBER, True, most=4096),
        5: Field("value_dim", NUMBER, True, most=4096),
        6: Field("rope", MESSAGE, schema=_ROPE),
    },
    384,
    _layer,
)
LAYOUT = Schema(
    "CacheLayout",
    {
        1: Field("encoding", NUMBER, True, codes=3),
        2: Field("max_context_tokens", NUMBER, True, most=POSITION),
        3: Field("layers", MESSAGE, True, repeated=512, schema=_LAYER),
    },
    262_144,
    _layout,
)
_CONSTANT = Schema("Constant", {1: Field("name", TEXT, True), 2: Field("bits", FIXED64)})
IDENTITY = Schema(
    "Identity",
    {
        1: Field("tenant", TEXT, True),
        2: Field("weights_digest", DIGEST, True),
        3: Field("quantisation", TEXT, True),
        4: Field("adapter_digest", DIGEST, True),
        5: Field("tokenizer_digest", DIGEST, True),
        6: Field("chat_template_digest", DIGEST, True),
        7: Field("engine_abi", TEXT, True),
        8: Field("layout", MESSAGE, True, schema=LAYOUT),
        9: Field("constants", MESSAGE, repeated=256, schema=_CONSTANT),
    },
    262_144,
    _identity,
)
_NAMED = Schema("NumericsValue", {1: Field("name", TEXT, True), 2: Field("value", TEXT, True)})
_NUMERICS = Schema(
    "NumericsFingerprint",
    {1: Field("values", MESSAGE, repeated=256, schema=_NAMED)},
    check=_numerics,
)
_RUN = Schema(
    "CallRun",
    {
        1: Field("call_tokens", NUMBER, True, most=POSITION),
        2: Field("calls", NUMBER, True, most=POSITION),
        3: Field("dropped_tokens", NUMBER, most=POSITION),
    },
    check=_run,
)
_SCHEDULE = Schema("CallSchedule", {1: Field("runs", MESSAGE, repeated=65_536, schema=_RUN)})
_DRAFT_MODEL = Schema(
    "DraftModel",
    {
        1: Field("identity", MESSAGE, True, schema=IDENTITY),
        2: Field("numerics", MESSAGE, True, schema=_NUMERICS),
        3: Field("schedule", MESSAGE, True, schema=_SCHEDULE),
    },
)
_COMPONENT = Schema(
    "Component",
    {
        1: Field("kind", NUMBER, True, codes=2),
        2: Field("identity_digest", DIGEST, True),
        3: Field("draft", MESSAGE, schema=_DRAFT_MODEL),
    },
    check=_component,
)
_PARENT = Schema(
    "ParentReference",
    {
        1: Field("manifest_id", DIGEST, True),
        2: Field("epoch", NUMBER, True, most=EPOCH),
        3: Field("position", NUMBER, True, most=POSITION),
        4: Field("depth", NUMBER, True, most=7),
    },
    check=_parent,
)
_RING = Schema(
    "ForeignRingHead",
    {1: Field("layer", NUMBER, most=511), 2: Field("head", NUMBER, most=POSITION)},
)
_REFERENCE = Schema(
    "ChunkReference",
    {
        1: Field("chunk_class", NUMBER, True, codes=7),
        2: Field("layers", PACKED, most=511),
        3: Field("first_position", NUMBER, most=POSITION),
        4: Field("token_count", NUMBER, most=65_536),
        5: Field("part", NUMBER, most=254),
        6: Field("content_id", DIGEST, True),
        7: Field("seal_id", DIGEST, True),
        8: Field("codec", NUMBER, True, codes=2),
        9: Field("aead", NUMBER, True, codes=2),
        10: Field("epoch", NUMBER, True, most=EPOCH),
        11: Field("plain_bytes", NUMBER, True, most=CHUNK),
        12: Field("encoded_bytes", NUMBER, True, most=CHUNK),
        13: Field("first_used", NUMBER, most=255),
        14: Field("count_used", NUMBER, most=256),
    },
    1184,
    _reference,
)
MANIFEST = Schema(
    "Manifest",
    {
        1: Field("window_rule", NUMBER, True, codes=1),
        2: Field("producer", NUMBER, True, codes=4),
        3: Field("position", NUMBER, most=POSITION),
        4: Field("numerics", MESSAGE, True, schema=_NUMERICS),
        5: Field("schedule", MESSAGE, True, schema=_SCHEDULE),
        6: Field("components", MESSAGE, True, repeated=2, schema=_COMPONENT),
        7: Field("parent", MESSAGE, schema=_PARENT),
        8: Field("foreign_ring_heads", MESSAGE, repeated=512, schema=_RING),
        9: Field("references", MESSAGE, repeated=65_536, schema=_REFERENCE),
    },
)
