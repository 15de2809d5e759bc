"""Section 3: the canonical scan of a message, and its values as a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.reference.verdict import Refused, cap, need

NUMBER, FIXED64, TEXT, DIGEST, MESSAGE, PACKED = range(6)
_WIRE = {NUMBER: 0, FIXED64: 1, TEXT: 2, DIGEST: 2, MESSAGE: 2, PACKED: 2}
_TEXT_BYTES = 256

#: Section 1: what no text may hold.
_REFUSED = (
    (0x0000, 0x001F), (0x007F, 0x00A0), (0x00AD, 0x00AD), (0x061C, 0x061C), (0x1680, 0x1680),
    (0x180E, 0x180E), (0x2000, 0x200F), (0x2028, 0x202F), (0x205F, 0x206F), (0x3000, 0x3000),
    (0xD800, 0xF8FF), (0xFDD0, 0xFDEF), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB), (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A), (0xE0000, 0x10FFFF),
)  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One row of a table of section 3 or 6."""

    name: str
    kind: int
    required: bool = False
    most: int = 2**32 - 1  # of a number, or of a packed element
    codes: int = 0  # above 0: a code from 1 to this
    repeated: int = 0  # above 0: at most that many
    schema: Schema | None = None


@dataclass(frozen=True)
class Schema:
    """One message: fields by number, the most bytes, and what must hold between fields."""

    name: str
    fields: dict[int, Field]
    most_bytes: int = 2**24
    check: Callable[[dict[str, Any], str], None] | None = None


def varint(data: bytes, at: int, stage: str) -> tuple[int, int]:
    """A minimal varint below 2^64, and where the next byte is.

    Raises:
        Refused: ``malformed``.
    """
    value = 0
    for index in range(10):
        need(at + index < len(data), stage, "a varint is cut")
        byte = data[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            need(index == 0 or byte != 0, stage, "a varint is not minimal")
            need(value < 2**64, stage, "a varint is above 64 bits")
            return value, at + index + 1
    raise Refused("malformed", stage, "a varint is longer than 10 bytes")


def parse(schema: Schema, data: bytes, stage: str) -> dict[str, Any]:
    """Scan ``data`` and return its values; a missing number is 0, a missing message None.

    ``raw`` is ``data`` itself: digests are over the bytes as they stand.

    Raises:
        Refused: A rule of section 3 does not hold.
    """
    cap(len(data), schema.most_bytes, stage, f"bytes of {schema.name}")
    values: dict[str, Any] = {"raw": data}
    at, last = 0, 0
    while at < len(data):
        tag, at = varint(data, at, stage)
        need(tag < 2**32, stage, "a tag is above 32 bits")
        number = tag >> 3
        field = schema.fields.get(number)
        if field is None:
            raise Refused("malformed", stage, f"{schema.name} has no field {number}")
        again = number == last and field.repeated > 0
        need(number > last or again, stage, f"{schema.name}.{field.name} out of order or doubled")
        need(tag & 7 == _WIRE[field.kind], stage, f"{schema.name}.{field.name} has a wrong type")
        last = number
        at = _value(field, data, at, values, stage)
    _complete(schema, values, stage)
    return values


def _value(field: Field, data: bytes, at: int, values: dict[str, Any], stage: str) -> int:
    if field.kind == NUMBER:
        value, at = varint(data, at, stage)
        need(value != 0, stage, f"{field.name} is an explicit default")
        values[field.name] = _number(field, value, stage)
        return at
    size = 8
    if field.kind != FIXED64:
        size, at = varint(data, at, stage)
    need(size <= len(data) - at, stage, f"{field.name} is cut")
    found = _content(field, data[at : at + size], stage)
    if field.repeated:
        items = values.setdefault(field.name, [])
        items.append(found)
        cap(len(items), field.repeated, stage, f"count of {field.name}")
    else:
        values[field.name] = found
    return at + size


def _number(field: Field, value: int, stage: str) -> int:
    if field.codes:
        need(1 <= value <= field.codes, stage, f"{field.name} {value} is no code")
    cap(value, field.most, stage, field.name)
    return value


def _content(field: Field, data: bytes, stage: str) -> Any:
    if field.kind == MESSAGE:
        if field.schema is None:
            raise Refused("failure", stage, f"no schema for {field.name}")
        return parse(field.schema, data, stage)
    if field.kind == FIXED64:
        need(data != bytes(8), stage, f"{field.name} is an explicit default")
        return int.from_bytes(data, "little")
    need(len(data) > 0, stage, f"{field.name} is an explicit default")
    if field.kind == DIGEST:
        need(len(data) == 32, stage, f"{field.name} is no digest")
        return data
    return text(data, stage, field.name) if field.kind == TEXT else _packed(field, data, stage)


def text(data: bytes, stage: str, what: str) -> str:
    """A name or text value: 1 to 256 bytes of printable UTF-8.

    Raises:
        Refused: It is not.
    """
    cap(len(data), _TEXT_BYTES, stage, f"bytes of {what}")
    try:
        value = data.decode()
    except UnicodeDecodeError as error:
        raise Refused("malformed", stage, f"{what} is not UTF-8") from error
    need(value != "" and all(map(_good, map(ord, value))), stage, f"{what} is not printable")
    return value


def _good(point: int) -> bool:
    if 0x20 <= point <= 0x7E:
        return True
    last_two = point & 0xFFFE == 0xFFFE
    return not last_two and not any(first <= point <= last for first, last in _REFUSED)


def _packed(field: Field, data: bytes, stage: str) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = varint(data, at, stage)
        values.append(_number(field, value, stage))
        cap(len(values), 512, stage, f"count of {field.name}")
    return values


def _complete(schema: Schema, values: dict[str, Any], stage: str) -> None:
    for field in schema.fields.values():
        if field.name in values:
            continue
        need(not field.required, stage, f"{schema.name}.{field.name} is missing")
        if field.repeated or field.kind == PACKED:
            values[field.name] = []
        else:
            values[field.name] = 0 if field.kind in (NUMBER, FIXED64) else None
    if schema.check is not None:
        schema.check(values, stage)
