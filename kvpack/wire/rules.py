"""Rules of every message: field numbers, types and caps, as docs/spec/kvpack-v1.md lists them."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from kvpack import codes, limits
from kvpack.codes import Codes
from kvpack.wire.scan import FieldRule, Kind, MessageRule

DIGEST_BYTES: Final = 32

#: PACKED fields: two bytes for each element below 512.
_LAYERS_BYTES_MAX: Final = 2 * limits.LAYERS_MAX


def _uint(name: str, high: int, *, required: bool = False) -> FieldRule:
    return FieldRule(name, Kind.UINT, high, required=required)


def _choice(name: str, choices: Codes[Any]) -> FieldRule:
    return FieldRule(name, Kind.UINT, required=True, choices=choices)


def _name(name: str) -> FieldRule:
    return FieldRule(name, Kind.STRING, limits.NAME_BYTES_MAX, required=True)


def _digest(name: str) -> FieldRule:
    return FieldRule(name, Kind.BYTES, DIGEST_BYTES, low=DIGEST_BYTES, required=True)


def _one(name: str, message: MessageRule, *, required: bool = False) -> FieldRule:
    return FieldRule(name, Kind.MESSAGE, message.bytes_max, 0, required, message=message)


def _many(name: str, message: MessageRule, count_max: int, *, required: bool = False) -> FieldRule:
    return FieldRule(name, Kind.MESSAGE, message.bytes_max, 0, required, count_max, message)


def _message(bytes_max: int, *fields: FieldRule) -> MessageRule:
    numbered = dict(enumerate(fields, start=1))
    required = frozenset(number for number, field in numbered.items() if field.required)
    return MessageRule(MappingProxyType(numbered), required, bytes_max)


ROPE: Final = _message(
    320,
    FieldRule("theta_bits", Kind.FIXED64),
    _uint("dims", limits.HEAD_DIM_MAX, required=True),
    _choice("pairing", codes.PAIRINGS),
    _name("scaling"),
)

LAYER: Final = _message(
    384,
    _choice("kind", codes.LAYER_KINDS),
    _uint("window_tokens", limits.POSITION_MAX),
    _uint("kv_heads", limits.KV_HEADS_MAX, required=True),
    _uint("key_dim", limits.HEAD_DIM_MAX, required=True),
    _uint("value_dim", limits.HEAD_DIM_MAX, required=True),
    _one("rope", ROPE),
)

LAYOUT: Final = _message(
    limits.IDENTITY_BYTES_MAX,
    _choice("encoding", codes.ENCODINGS),
    _uint("max_context_tokens", limits.POSITION_MAX, required=True),
    _many("layers", LAYER, limits.LAYERS_MAX, required=True),
)

CONSTANT: Final = _message(
    limits.NAME_BYTES_MAX + 16, _name("name"), FieldRule("bits", Kind.FIXED64)
)

IDENTITY: Final = _message(
    limits.IDENTITY_BYTES_MAX,
    _name("tenant"),
    _digest("weights_digest"),
    _name("quantisation"),
    _digest("adapter_digest"),
    _digest("tokenizer_digest"),
    _digest("chat_template_digest"),
    _name("engine_abi"),
    _one("layout", LAYOUT, required=True),
    _many("constants", CONSTANT, limits.NAMED_VALUES_MAX),
)

NUMERICS_VALUE: Final = _message(2 * limits.NAME_BYTES_MAX + 8, _name("name"), _name("value"))

NUMERICS: Final = _message(
    limits.NAMED_VALUES_MAX * (2 * limits.NAME_BYTES_MAX + 16),
    _many("values", NUMERICS_VALUE, limits.NAMED_VALUES_MAX),
)

CALL_RUN: Final = _message(
    16,
    _uint("call_tokens", limits.POSITION_MAX, required=True),
    _uint("calls", limits.POSITION_MAX, required=True),
    _uint("dropped_tokens", limits.SPECULATIVE_BLOCK_TOKENS_MAX - 1),
)

SCHEDULE: Final = _message(
    limits.SCHEDULE_RUNS_MAX * 16, _many("runs", CALL_RUN, limits.SCHEDULE_RUNS_MAX)
)

REFERENCE: Final = _message(
    _LAYERS_BYTES_MAX + 160,
    _choice("chunk_class", codes.CHUNK_CLASSES),
    FieldRule("layers", Kind.PACKED, limits.LAYER_INDEX_MAX, count_max=limits.LAYERS_MAX),
    _uint("first_position", limits.POSITION_MAX),
    _uint("token_count", limits.TOKEN_IDS_PER_CHUNK),
    _uint("part", limits.PART_MAX),
    _digest("content_id"),
    _digest("seal_id"),
    _choice("codec", codes.CODECS),
    _choice("aead", codes.AEADS),
    _uint("epoch", limits.EPOCH_MAX, required=True),
    _uint("plain_bytes", limits.CHUNK_PLAINTEXT_BYTES_MAX, required=True),
    _uint("encoded_bytes", limits.CHUNK_PLAINTEXT_BYTES_MAX, required=True),
    _uint("first_used", limits.GRID_TOKENS - 1),
    _uint("count_used", limits.GRID_TOKENS - 1),
)

DRAFT_MODEL: Final = _message(
    limits.MANIFEST_BYTES_MAX,
    _one("identity", IDENTITY, required=True),
    _one("numerics", NUMERICS, required=True),
    _one("schedule", SCHEDULE, required=True),
)

COMPONENT: Final = _message(
    limits.MANIFEST_BYTES_MAX,
    _choice("kind", codes.COMPONENT_KINDS),
    _digest("identity_digest"),
    _one("draft", DRAFT_MODEL),
)

PARENT: Final = _message(
    64,
    _digest("manifest_id"),
    _uint("epoch", limits.EPOCH_MAX, required=True),
    _uint("position", limits.POSITION_MAX, required=True),
    _uint("depth", limits.PARENT_DEPTH_MAX, required=True),
)

RING_HEAD: Final = _message(
    16, _uint("layer", limits.LAYER_INDEX_MAX), _uint("head", limits.POSITION_MAX)
)

MANIFEST: Final = _message(
    limits.MANIFEST_BYTES_MAX,
    _choice("window_rule", codes.WINDOW_RULES),
    _choice("producer", codes.PRODUCERS),
    _uint("position", limits.POSITION_MAX),
    _one("numerics", NUMERICS, required=True),
    _one("schedule", SCHEDULE, required=True),
    _many("components", COMPONENT, 2, required=True),
    _one("parent", PARENT),
    _many("foreign_ring_heads", RING_HEAD, limits.LAYERS_MAX),
    _many("references", REFERENCE, limits.REFERENCES_MAX),
)
