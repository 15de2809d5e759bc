"""What a route is: its path, who may call it, and the function that answers.

A route that does not say who may call it cannot be made, and the one list of routes
(:mod:`node.http.routes`) is all that a server knows.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from node.http.body import read_json

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from node.http.door import Door
    from node.serving.serving import Serving

_T = TypeVar("_T")


class Access(enum.Enum):
    """Who may call a route."""

    PUBLIC = "public"  # everybody who reaches the port: plain liveness alone
    TENANT = "tenant"  # whoever has a key; sees what is its tenant's
    ADMIN = "admin"  # whoever has a key that says so; sees the node


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        tenant: Whose data it may see.
        is_admin: Whether it may see the node's.
    """

    tenant: str
    is_admin: bool


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """One request, let in.

    Attributes:
        request: Starlette's; its body may be read once, by :meth:`json`.
        door: It came in by.
        caller: Who calls.
        request_id: A name for it in logs and in the ``x-request-id`` header.
    """

    request: Request
    door: Door
    caller: Caller
    request_id: str

    @property
    def serving(self) -> Serving:
        """The running node.

        Raises:
            ApiError: 503: the model is being loaded.
        """
        return self.door.serving

    @property
    def tenant(self) -> str:
        """Whose data it may see."""
        return self.caller.tenant

    async def json(self, kind: type[_T]) -> _T:
        """The body as a value of ``kind``; fields that ``kind`` lacks are ignored.

        Raises:
            ApiError: Too long, too slow, no JSON, or not such a value.
        """
        return await read_json(self.request, kind)


Answer: TypeAlias = "Response | ASGIApp"
Handler: TypeAlias = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route.

    Attributes:
        path: Starlette's form, with ``{name}`` for a part that varies.
        method: ``GET``, ``POST`` or ``DELETE``; ``GET`` answers ``HEAD``, too.
        access: Who may call it.
        handler: Answers: an ASGI application, most often a response.
        computes: Whether it uses the model: such a call is refused while the node drains, and
            counts against its tenant's quota.
    """

    path: str
    method: str
    access: Access
    handler: Handler
    computes: bool = False
