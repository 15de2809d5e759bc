"""Bodies of requests: read up to a bound, in bounded time, and decoded as typed values."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from node.http.errors import ApiError, bad_request

_T = TypeVar("_T")

#: A context of 130,000 tokens as JSON text is below 1 MiB; tools and escapes take the rest.
BODY_BYTES_MAX: Final = 8 << 20

#: How long a client may take to send it.
BODY_S: Final = 30.0

#: Where the body of a request is kept that may have to be passed on; only there if it may.
KEPT_BODY: Final = "kvpack.body"

#: Larger bodies are decoded on a worker thread: the loop has answers to stream.
_BESIDE_BYTES: Final = 64 << 10


async def read_body(request: Request, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 where it is longer than ``bytes_max``, 408 where it comes too slowly.
    """
    kept = request.scope.get(KEPT_BODY)
    if isinstance(kept, bytes):
        return kept
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > bytes_max:
                    raise _too_large(bytes_max)
    except TimeoutError:
        raise ApiError(
            408, "request_timeout", f"body: expected within {BODY_S:.0f} s",
            headers={"Connection": "close"},
        ) from None  # fmt: skip
    except ClientDisconnect:
        raise ApiError(400, "client_gone", "body: the connection ended inside it") from None
    if KEPT_BODY in request.scope:
        request.scope[KEPT_BODY] = bytes(body)
    return bytes(body)


async def read_json(request: Request, kind: type[_T]) -> _T:
    """The body as a value of ``kind``.

    Raises:
        ApiError: Too long, too slow, no JSON, or not such a value: names the field.
    """
    body = await read_body(request)
    if len(body) > _BESIDE_BYTES:
        return await asyncio.to_thread(decode_json, body, kind)
    return decode_json(body, kind)


def decode_json(body: bytes, kind: type[_T]) -> _T:
    """``body`` as a value of ``kind``.

    Raises:
        ApiError: No JSON, or not such a value: names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"body: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("body: nested too deeply", code="invalid_json") from None


def convert(value: Any, kind: type[_T]) -> _T:  # noqa: ANN401 - whatever JSON may hold
    """A decoded ``value`` as one of ``kind``.

    Raises:
        ApiError: It is not one: names the field.
    """
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """msgspec says ``what - at `$.path` ``, and quotes no value but that of a closed choice."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    return bad_request(f"{path or 'body'}: {what}", param=path or None, code="invalid_value")


def _too_large(bytes_max: int) -> ApiError:
    # What is left of the body is never read, so the connection cannot go on.
    return ApiError(
        413, "body_too_large", f"body: expected at most {bytes_max} bytes",
        headers={"Connection": "close"},
    )  # fmt: skip
