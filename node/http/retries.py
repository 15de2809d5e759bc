"""``Idempotency-Key``: asking again tells what was answered, and does nothing a second time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from node.http.access import Call
from node.http.errors import ApiError, bad_request
from node.records import Answer, BusyError, ConflictError
from node.records.values import KEY_CHARS_MAX

HEADER: Final = "idempotency-key"

#: Beside an answer that was made before.
REPLAYED: Final = {"x-idempotent-replay": "true"}


@dataclass(frozen=True, slots=True, repr=False)
class RetryKey:
    """What a client names a request by.

    Attributes:
        key: The client's.
        digest: Of the request, 32 bytes.
    """

    key: str
    digest: bytes

    def answer(self, body: bytes) -> Answer:
        """What those are told that ask again."""
        return Answer(self.key, self.digest, 200, body)


async def retry_key(call: Call, body: object) -> RetryKey | None:
    """The key of a request; None: it has none.

    Raises:
        ApiError: It is empty or too long.
    """
    key = call.request.headers.get(HEADER)
    if key is None:
        return None
    if not 1 <= len(key) <= KEY_CHARS_MAX:
        raise bad_request(
            f"Idempotency-Key: expected 1 to {KEY_CHARS_MAX} characters, found {len(key)}"
        )
    # A body may have megabytes: not on the loop.
    return RetryKey(key, await asyncio.to_thread(_digest, call.request.url.path, body))


def _digest(path: str, body: object) -> bytes:
    digest = hashlib.sha256(path.encode() + b"\0")
    digest.update(msgspec.json.encode(body, order="sorted"))
    return digest.digest()


@contextlib.asynccontextmanager
async def one_request(call: Call, retry: RetryKey | None) -> AsyncIterator[Answer | None]:
    """Be the one request with that key while the block runs; what it was answered, if it was.

    Raises:
        ApiError: 409: the key was used for another request, or its request still runs.
    """
    if retry is None:
        yield None
        return
    with refusals():
        async with call.serving.records.one_request(call.tenant, retry.key, retry.digest) as before:
            yield before


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Conflicts as clients read them: whether to come again is said in a header.

    Raises:
        ApiError: 409.
    """
    try:
        yield
    except ConflictError as error:
        # The same again would be refused again: OpenAI's clients obey this header.
        headers = {"x-should-retry": "false"}
        raise ApiError(409, "conflict", str(error), headers=headers) from error
    except BusyError as error:
        headers = {"Retry-After": "1", "x-should-retry": "true"}
        raise ApiError(409, "busy", str(error), headers=headers) from error
