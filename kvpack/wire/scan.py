"""The strict wire scan: what a message's bytes must look like before anything parses them.

Protobuf parsers are lenient: they take fields in any order, doubled, over-long varints, unknown
fields, and give one value for many byte strings. Here one value has one encoding:

1. Field numbers ascend; only a repeated field may occur again, and then directly after itself.
2. A field that the rules do not know is refused, and so is a wire type other than the declared one.
3. Varints are minimal. Scalars, strings and packed lists with their default value are absent.
4. Values, lengths and counts are inside their caps.
5. Required fields are present.
6. All of this holds inside every embedded message. Rules nest three deep and never recurse.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvpack.codes import Codes
from kvpack.errors import FormatError, LimitError

_VARINT_BYTES_MAX: Final = 10
_TAG_MAX: Final = (1 << 32) - 1
_UINT64_MAX: Final = (1 << 64) - 1

#: The largest number, and length, in one byte.
_PLAIN_MAX: Final = 0x7F

#: The longest list or text that a pattern knows.
_PLAIN_LIST_MAX: Final = 64


class Kind(enum.Enum):
    """What a field holds; the value is the wire type that it must have, and a word for it."""

    UINT = (0, "varint")
    FIXED64 = (1, "fixed64")
    BYTES = (2, "bytes")
    STRING = (2, "string")
    PACKED = (2, "packed varints")
    MESSAGE = (2, "message")


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What one field may hold.

    Attributes:
        name: For error paths.
        kind: Type on the wire.
        high: UINT and PACKED: the largest value. Otherwise the largest length in bytes.
        low: The smallest length in bytes; 1 except for digests, which have one length, and for
            messages, which may be present and empty.
        required: Absence is an error.
        count_max: Occurrences of a repeated field or elements of a packed one; 0 for singular.
        message: The rules of an embedded message.
        choices: The words that a UINT stands for.
        wire_type: The low three bits of the field's tag.
    """

    name: str
    kind: Kind
    high: int = _UINT64_MAX
    low: int = 1
    required: bool = False
    count_max: int = 0
    message: MessageRule | None = None
    choices: Codes[Any] | None = None
    wire_type: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "wire_type", self.kind.value[0])


def plain_pattern(fields: Mapping[int, FieldRule]) -> re.Pattern[bytes] | None:
    """What a message of numbers, digests and short lists looks like; None for those of other kinds.

    A manifest is thousands of references: one match replaces a dozen steps. It matches nothing that
    :func:`scan` would refuse, and finds no error: whatever it does not match is scanned.
    """
    parts = []
    for number, rule in fields.items():
        form, tag_value = _plain_form(rule), number << 3 | rule.wire_type
        if form is None or tag_value > _PLAIN_MAX:
            return None
        tag = re.escape(bytes((tag_value,)))
        parts.append(b"(?:%b%b)%b" % (tag, form, b"" if rule.required else b"?"))
    return re.compile(b"".join(parts), re.DOTALL)


def _plain_form(rule: FieldRule) -> bytes | None:
    """A pattern for the field without its tag."""
    if rule.kind is Kind.UINT and not rule.count_max:
        return _plain_number(rule.high if rule.choices is None else len(rule.choices.words))
    if rule.kind is Kind.BYTES and not rule.count_max and rule.low == rule.high <= _PLAIN_MAX:
        return re.escape(bytes((rule.high,))) + b".{%d}" % rule.high
    if rule.kind is Kind.FIXED64 and not rule.count_max:
        return b"(?!\\x00{8}).{8}"
    numbers = rule.kind is Kind.PACKED and rule.high >= _PLAIN_MAX
    text = rule.kind is Kind.STRING and not rule.count_max
    if numbers or text:
        # Characters of ASCII, and numbers below 128, are a byte each.
        counts = range(rule.low, min(rule.high if text else rule.count_max, _PLAIN_LIST_MAX) + 1)
        lists = (re.escape(bytes((n,))) + b"[\\x00-\\x7f]{%d}" % n for n in counts)
        return b"(?:%b)" % b"|".join(lists)
    return None


def _plain_number(high: int) -> bytes:
    """Minimal varints of 1 and of some numbers up to ``high``: wherever the last byte decides."""
    forms = [b"[\\x01-\\x%02x]" % min(high, _PLAIN_MAX)]
    for longer in range(1, 5):
        # With ``last`` as the last byte even the largest is below.
        last = min((high + 1 >> 7 * longer) - 1, _PLAIN_MAX)
        if last >= 1:
            forms.append(b"[\\x80-\\xff]{%d}[\\x01-\\x%02x]" % (longer, last))
    return b"(?:%b)" % b"|".join(forms)


@dataclass(frozen=True, slots=True)
class MessageRule:
    """What one message may hold: its fields by number, and the largest encoding in bytes.

    ``required`` are the numbers of the fields that must be present. What ``plain`` matches is one
    of its encodings; what it does not match may be one too.
    """

    fields: Mapping[int, FieldRule]
    required: frozenset[int]
    bytes_max: int
    plain: re.Pattern[bytes] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", plain_pattern(self.fields))


def scan(rule: MessageRule, data: bytes, path: str) -> None:
    """Check that ``data`` is the one canonical encoding of some message under ``rule``.

    Args:
        rule: What the message may hold.
        data: The whole encoding.
        path: Name of the message, the beginning of every field path in an error.

    Raises:
        FormatError: The encoding is not canonical, or a field is unknown or missing.
        LimitError: A value, length or count is outside its cap.
    """
    if len(data) > rule.bytes_max:
        raise LimitError(path, f"at most {rule.bytes_max} bytes", f"{len(data)} bytes")
    _scan_message(rule, data, 0, len(data), path)


def _scan_message(rule: MessageRule, data: bytes, offset: int, end: int, path: str) -> None:
    last = occurrences = 0
    missing = rule.required
    while offset < end:
        tag = data[offset]
        if tag < 0x80:
            offset += 1
        else:
            tag, offset = _varint(data, offset, end, path)
        number, wire_type = tag >> 3, tag & 7
        field = rule.fields.get(number)
        if field is None or tag > _TAG_MAX:
            raise FormatError(path, f"fields {min(rule.fields)} to {max(rule.fields)}", number)
        if wire_type != field.wire_type:
            expected = f"wire type {field.wire_type}"
            raise FormatError(f"{path}.{field.name}", expected, f"wire type {wire_type}")
        if number > last:
            occurrences = 1
        elif number == last and field.count_max and field.kind is not Kind.PACKED:
            occurrences += 1
        else:
            raise FormatError(f"{path}.{field.name}", "once, in ascending order", "out of order")
        last = number
        if number in missing:
            missing = missing - {number}
        offset = _scan_field(field, data, offset, end, path, occurrences)
    if missing:
        raise FormatError(f"{path}.{rule.fields[min(missing)].name}", "present", "absent")


def _scan_field(
    rule: FieldRule, data: bytes, offset: int, end: int, path: str, occurrences: int
) -> int:
    """Check one field whose tag was read; returns the offset after it."""
    name = f"{path}.{rule.name}"
    if rule.count_max and rule.kind is not Kind.PACKED:
        if occurrences > rule.count_max:
            raise LimitError(name, f"at most {rule.count_max} entries", occurrences)
        name = f"{name}[{occurrences - 1}]"
    if rule.kind is Kind.UINT:
        value, offset = _varint(data, offset, end, name)
        _check_value(rule, value, name)
        return offset
    if rule.kind is Kind.FIXED64:
        return _scan_fixed64(data, offset, end, name)
    length, offset = _varint(data, offset, end, name)
    high = rule.high if rule.kind is not Kind.PACKED else _VARINT_BYTES_MAX * rule.count_max
    if not rule.low <= length <= high:
        raise LimitError(name, f"{rule.low} to {high} bytes", f"{length} bytes")
    stop = offset + length
    if stop > end:
        raise FormatError(name, f"{length} bytes", f"{end - offset} bytes left")
    if rule.kind is not Kind.BYTES:
        _scan_content(rule, data, offset, stop, name)
    return stop


def _check_value(rule: FieldRule, value: int, name: str) -> None:
    if value == 0:
        raise FormatError(name, "absent where the value is 0", "a zero on the wire")
    if rule.choices is not None:
        rule.choices.member(value, name)
    elif value > rule.high:
        raise LimitError(name, f"1 to {rule.high}", value)


def _scan_content(rule: FieldRule, data: bytes, offset: int, stop: int, name: str) -> None:
    if rule.message is not None:
        plain = rule.message.plain
        if plain is not None and plain.fullmatch(data, offset, stop):
            return
        _scan_message(rule.message, data, offset, stop, name)
    elif rule.kind is Kind.PACKED:
        _scan_packed(rule, data, offset, stop, name)
    elif rule.kind is Kind.STRING:
        try:
            data[offset:stop].decode()
        except UnicodeDecodeError:
            raise FormatError(name, "UTF-8", "other bytes") from None


def _scan_packed(rule: FieldRule, data: bytes, offset: int, stop: int, name: str) -> None:
    count = 0
    while offset < stop:
        value, offset = _varint(data, offset, stop, name)
        if value > rule.high:
            raise LimitError(f"{name}[{count}]", f"0 to {rule.high}", value)
        count += 1
        if count > rule.count_max:
            raise LimitError(name, f"at most {rule.count_max} entries", count)


def _scan_fixed64(data: bytes, offset: int, end: int, name: str) -> int:
    stop = offset + 8
    if stop > end:
        raise FormatError(name, "8 bytes", f"{end - offset} bytes left")
    if not any(data[offset:stop]):
        raise FormatError(name, "absent where the value is 0", "a zero on the wire")
    return stop


def _varint(data: bytes, offset: int, end: int, name: str) -> tuple[int, int]:
    """Read one minimal varint; returns its value and the offset after it."""
    if offset < end and data[offset] < 0x80:
        return data[offset], offset + 1
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
        if offset >= end:
            raise FormatError(name, "a whole varint", "the end of the message")
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if byte == 0 and shift:
                raise FormatError(name, "a minimal varint", "a padded one")
            if value > _UINT64_MAX:
                break
            return value, offset
    raise FormatError(name, "a varint below 2^64", "a larger one")
