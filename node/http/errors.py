"""Refusals as HTTP: a status, and the body that OpenAI's clients read.

``{"error": {"message", "type", "param", "code"}}``, the same as an event once a stream has begun.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response

from kvpack.errors import FieldError, KvpackError
from node.errors import ContextLengthError, NodeError
from node.status import http_status_of, retry_after_s

_TYPES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


#: What OpenAI's clients know as the word for a context that is too long.
TOO_LONG: Final = "context_length_exceeded"


class ApiError(NodeError):
    """A request is refused. What is said goes to the client as it stands.

    Attributes:
        status: HTTP's.
        code: A stable word for programs.
        param: The field of the request that is meant; None: none in particular.
        headers: Beside the body.
    """

    reason = "api_refusal"

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = int(status)
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        super().__init__(message)


def bad_request(
    message: str, *, param: str | None = None, code: str = "invalid_request"
) -> ApiError:
    """400: nothing of it was done."""
    return ApiError(HTTPStatus.BAD_REQUEST, code, message, param=param)


def not_found(message: str, *, param: str | None = None, code: str = "not_found") -> ApiError:
    """404: it is not there, or it is somebody else's."""
    return ApiError(HTTPStatus.NOT_FOUND, code, message, param=param)


def unsupported(field: str, why: str) -> ApiError:
    """400 for a field that would change the answer and that this node does not know."""
    return bad_request(f"{field}: {why}", param=field, code="unsupported_parameter")


def unavailable(code: str, message: str, after_s: float = 1.0) -> ApiError:
    """503: later, perhaps."""
    headers = {"Retry-After": str(max(1, math.ceil(after_s)))}
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, code, message, headers=headers)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error as it goes over HTTP: once as an answer, once as an event.

    Attributes:
        status: HTTP's.
        body: ``{"error": …}``.
        headers: Beside the body.
    """

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """The stable word."""
        return str(self.body["error"]["code"])

    def response(self) -> Response:
        """As an answer."""
        return Response(
            msgspec.json.encode(self.body), self.status, self.headers, "application/json"
        )


def refusal_of(error: KvpackError) -> Refusal:
    """What ``error`` says to a client of HTTP."""
    if isinstance(error, ApiError):
        return _refusal(error.status, error.code, str(error), error.param, error.headers)
    if isinstance(error, ContextLengthError):
        return _refusal(HTTPStatus.BAD_REQUEST, TOO_LONG, str(error), "messages", {})
    status = http_status_of(error)
    headers = {}
    after_s = retry_after_s(error)
    if after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(after_s)))
    param = error.field if isinstance(error, FieldError) else None
    return _refusal(status, error.reason, str(error), param, headers)


def broken(code: str = "internal_error") -> Refusal:
    """What is said where this node itself failed: why is in its log, not on the wire."""
    message = "this node failed; its log says why"
    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, code, message, None, {})


def _refusal(
    status: int, code: str, message: str, param: str | None, headers: Mapping[str, str]
) -> Refusal:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Refusal(int(status), {"error": error}, dict(headers))
