"""Layout, identity, numerics and schedule as canonical protobuf bytes, and back.

``encode`` of equal values gives equal bytes, and ``decode`` accepts no other bytes for them. Every
``decode`` scans before it parses, so the parser never sees a message that is not canonical.
"""

from __future__ import annotations

from typing import Final, TypeVar

from blake3 import blake3
from google.protobuf.message import Message

from kvpack import codes
from kvpack.codes import Pairing
from kvpack.errors import malformed_not_mismatched
from kvpack.identity import CallRun, CallSchedule, Identity, NumericsFingerprint
from kvpack.layout import CacheLayout, LayerLayout, RopeLayout
from kvpack.pb.v1 import identity_pb2 as pb
from kvpack.wire import rules
from kvpack.wire.scan import MessageRule, scan

_IDENTITY_CONTEXT: Final = b"kvpack/v1/identity\0"
_LAYOUT_CONTEXT: Final = b"kvpack/v1/layout\0"

_Parsed = TypeVar("_Parsed", bound=Message)


def encode_layout(layout: CacheLayout) -> bytes:
    """The canonical bytes of ``layout``."""
    return serialize(_layout_message(layout))


def decode_layout(data: bytes) -> CacheLayout:
    """Read a layout.

    Raises:
        FormatError: The bytes are not the canonical encoding of a layout.
        LimitError: A field is outside its cap.
    """
    return _layout_value(parse(pb.CacheLayout(), rules.LAYOUT, data, "layout"))


def layout_digest(layout: CacheLayout) -> bytes:
    """32 bytes over the canonical encoding of ``layout``."""
    return blake3(_LAYOUT_CONTEXT + encode_layout(layout)).digest()


def encode_identity(identity: Identity) -> bytes:
    """The canonical bytes of ``identity``, its tenant and layout included."""
    return serialize(identity_message(identity))


def identity_message(identity: Identity) -> pb.Identity:
    """``identity`` as a message."""
    return pb.Identity(
        tenant=identity.tenant,
        weights_digest=identity.weights_digest,
        quantisation=identity.quantisation,
        adapter_digest=identity.adapter_digest,
        tokenizer_digest=identity.tokenizer_digest,
        chat_template_digest=identity.chat_template_digest,
        engine_abi=identity.engine_abi,
        layout=_layout_message(identity.layout),
        constants=[pb.Constant(name=name, bits=bits) for name, bits in identity.constants],
    )


def decode_identity(data: bytes) -> Identity:
    """Read an identity.

    Raises:
        FormatError: The bytes are not the canonical encoding of an identity.
        LimitError: A field is outside its cap.
    """
    return identity_value(parse(pb.Identity(), rules.IDENTITY, data, "identity"))


def identity_value(message: pb.Identity) -> Identity:
    """The identity that a scanned ``message`` stands for.

    Raises:
        FormatError: Fields contradict each other. LimitError: a field is outside its cap.
    """
    return Identity(
        tenant=message.tenant,
        weights_digest=message.weights_digest,
        quantisation=message.quantisation,
        adapter_digest=message.adapter_digest,
        tokenizer_digest=message.tokenizer_digest,
        chat_template_digest=message.chat_template_digest,
        engine_abi=message.engine_abi,
        layout=_layout_value(message.layout),
        constants=tuple((constant.name, constant.bits) for constant in message.constants),
    )


def identity_digest(identity: Identity) -> bytes:
    """32 bytes over the canonical encoding of ``identity``."""
    return blake3(_IDENTITY_CONTEXT + encode_identity(identity)).digest()


def encode_numerics(numerics: NumericsFingerprint) -> bytes:
    """The canonical bytes of ``numerics``."""
    return serialize(numerics_message(numerics))


def decode_numerics(data: bytes) -> NumericsFingerprint:
    """Read a numerics fingerprint.

    Raises:
        FormatError: The bytes are not canonical.
        LimitError: A field is outside its cap, or names do not ascend.
    """
    message = parse(pb.NumericsFingerprint(), rules.NUMERICS, data, "numerics")
    return numerics_value(message)


def encode_schedule(schedule: CallSchedule) -> bytes:
    """The canonical bytes of ``schedule``."""
    return serialize(schedule_message(schedule))


def decode_schedule(data: bytes) -> CallSchedule:
    """Read a call schedule.

    Raises:
        FormatError: The bytes are not canonical.
        LimitError: A count is outside its cap.
    """
    return schedule_value(parse(pb.CallSchedule(), rules.SCHEDULE, data, "schedule"))


def serialize(message: Message) -> bytes:
    """The canonical bytes of ``message``: fields ascend, defaults are absent, no map exists."""
    return message.SerializeToString(deterministic=True)


def parse(message: _Parsed, rule: MessageRule, data: bytes, path: str) -> _Parsed:
    """Scan ``data``, then parse it into ``message``, which is returned.

    Raises:
        FormatError: The bytes are not canonical.
        LimitError: A value, length or count is outside its cap.
    """
    scan(rule, data, path)
    message.ParseFromString(data)
    return message


def numerics_message(numerics: NumericsFingerprint) -> pb.NumericsFingerprint:
    """``numerics`` as a message."""
    values = [pb.NumericsValue(name=name, value=value) for name, value in numerics.values]
    return pb.NumericsFingerprint(values=values)


def numerics_value(message: pb.NumericsFingerprint) -> NumericsFingerprint:
    """The fingerprint that a scanned ``message`` stands for.

    Raises:
        LimitError: Names do not ascend, or a text holds a control character.
    """
    return NumericsFingerprint(tuple((pair.name, pair.value) for pair in message.values))


def schedule_message(schedule: CallSchedule) -> pb.CallSchedule:
    """``schedule`` as a message."""
    runs = [
        pb.CallRun(call_tokens=run.call_tokens, calls=run.calls, dropped_tokens=run.dropped_tokens)
        for run in schedule.runs
    ]
    return pb.CallSchedule(runs=runs)


def schedule_value(message: pb.CallSchedule) -> CallSchedule:
    """The schedule that a scanned ``message`` stands for.

    Raises:
        LimitError: A run drops more than its call can drop.
    """
    return CallSchedule(
        tuple(CallRun(run.call_tokens, run.calls, run.dropped_tokens) for run in message.runs)
    )


def _layout_message(layout: CacheLayout) -> pb.CacheLayout:
    return pb.CacheLayout(
        encoding=codes.ENCODINGS.code(layout.encoding),
        max_context_tokens=layout.max_context_tokens,
        layers=[_layer_message(layer) for layer in layout.layers],
    )


def _layer_message(layer: LayerLayout) -> pb.LayerLayout:
    message = pb.LayerLayout(
        kind=codes.LAYER_KINDS.code(layer.kind),
        window_tokens=layer.window_tokens or 0,
        kv_heads=layer.kv_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
    )
    if layer.rope is not None:
        pairing = Pairing.INTERLEAVED if layer.rope.interleaved else Pairing.HALVES
        message.rope.CopyFrom(
            pb.RopeLayout(
                theta_bits=layer.rope.theta_bits,
                dims=layer.rope.dims,
                pairing=codes.PAIRINGS.code(pairing),
                scaling=layer.rope.scaling,
            )
        )
    return message


def _layout_value(message: pb.CacheLayout) -> CacheLayout:
    with malformed_not_mismatched():
        return CacheLayout(
            layers=tuple(
                _layer_value(layer, f"layers[{number}]")
                for number, layer in enumerate(message.layers)
            ),
            encoding=codes.ENCODINGS.member(message.encoding, "layout.encoding"),
            max_context_tokens=message.max_context_tokens,
        )


def _layer_value(message: pb.LayerLayout, field: str) -> LayerLayout:
    rope = None
    if message.HasField("rope"):
        pairing = codes.PAIRINGS.member(message.rope.pairing, f"{field}.rope.pairing")
        rope = RopeLayout(
            theta_bits=message.rope.theta_bits,
            dims=message.rope.dims,
            interleaved=pairing is Pairing.INTERLEAVED,
            scaling=message.rope.scaling,
        )
    return LayerLayout(
        kind=codes.LAYER_KINDS.member(message.kind, f"{field}.kind"),
        window_tokens=message.window_tokens or None,
        kv_heads=message.kv_heads,
        key_dim=message.key_dim,
        value_dim=message.value_dim,
        rope=rope,
    )
