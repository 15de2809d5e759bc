"""The door itself: one ASGI application that says who comes in, and counts who is inside.

It is open before the model is loaded, so that a client learns "loading" and not "refused", and
until the last answer is given. What is behind it is put in once it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import secrets
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.requests import Request

from kvpack.errors import KvpackError
from node.errors import SessionMovedError
from node.http.access import Access, Answer, Call, Caller, Endpoint
from node.http.audit import Audit
from node.http.auth import LiveKeys, key_of
from node.http.body import KEPT_BODY
from node.http.errors import ApiError, Refusal, broken, refusal_of, unavailable
from node.http.hangup import ClientGone
from node.http.limits import HEAD_BYTES_MAX, IN_FLIGHT_MAX
from node.http.options import HttpOptions
from node.http.origin import check_host, check_origin
from node.http.quota import Quotas
from node.relay.values import RELAYED, Here, Relayed
from node.unexpected import unexpected

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from node.http.desk import Desk
    from node.relay.passing import Relay
    from node.serving.serving import Serving

_T = TypeVar("_T")

log = logging.getLogger(__name__)

#: In every answer. No browser is to guess that one is a page.
_HEADERS: Final = ((b"x-content-type-options", b"nosniff"),)

#: How often a session may turn out to have come here while a request was about to be passed on.
_HERE_MAX: Final = 3

#: How often a drain looks whether all answers are given.
_LOOK_S: Final = 0.05


class DoorState(enum.Enum):
    """What the node can do for a caller."""

    LOADING = "loading"
    SERVING = "ok"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered, for whoever counts.

    Attributes:
        route: Its path, without what varies in it.
        method: HTTP's.
        status: HTTP's; 499 where the client had gone before an answer began.
        seconds: From its head to its last byte.
    """

    route: str
    method: str
    status: int
    seconds: float


#: What a client is noted with that went before it was answered.
CLIENT_GONE: Final = 499


class _Count:
    """How many of something there are now."""

    def __init__(self) -> None:
        self.now = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One more, for as long as the block runs."""
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


class Door:
    """Who may come in, and what is behind.

    Attributes:
        state: What the node can do.
        quotas: What each tenant has.
        audit: What was refused; None until the data folder is known to be usable.
        observers: Called with each request that was answered. One that fails is logged, and the
            request does not feel it.
        refusal_observers: The same with the stable word of each refusal.
        stopping: Set once the node is to stop: streams without an end end then.
        relay: Passes on what is about another node's sessions; None: nobody does.
    """

    def __init__(self, options: HttpOptions, default_tenant: str) -> None:
        self.options = options
        self.state = DoorState.LOADING
        self.quotas = Quotas(options.calls_per_tenant or IN_FLIGHT_MAX, options.tokens_per_minute)
        self.audit: Audit | None = None
        self.observers: list[Callable[[Served], None]] = []
        self.refusal_observers: list[Callable[[str], None]] = []
        self.stopping = asyncio.Event()
        self.relay: Relay | None = None
        self._keys = None if options.api_key_file is None else LiveKeys(options.api_key_file)
        self._default_tenant = default_tenant
        self._desk: Desk | None = None
        self._serving: Serving | None = None
        self._in_flight = _Count()
        self._computing = _Count()

    @property
    def serving(self) -> Serving:
        """What is behind.

        Raises:
            ApiError: 503: the model is being loaded.
        """
        if self._serving is None:
            raise unavailable("loading", "the model is being loaded")
        return self._serving

    @property
    def desk(self) -> Desk:
        """What an operator reads; there from the first moment.

        Raises:
            RuntimeError: The door was made without.
        """
        if self._desk is None:
            raise RuntimeError("a door without a desk")
        return self._desk

    @desk.setter
    def desk(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def is_empty(self) -> bool:
        """Whether nobody is inside."""
        return not self._in_flight.now

    def open(self, serving: Serving) -> None:
        """Let callers reach the model."""
        self._serving = serving
        self.state = DoorState.SERVING

    async def drain(self) -> bool:
        """Let nobody begin, and wait until all who compute are answered, or the time is over.

        Returns:
            Whether all were answered.
        """
        self.state = DoorState.DRAINING
        self.stopping.set()
        end_s = time.monotonic() + self.options.drain_s
        while self._computing.now and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)
        return not self._computing.now

    def caller(self, request: Request, access: Access) -> Caller:
        """Who calls, if it may.

        Raises:
            ApiError: 401 without a good key, 403 with one that is not for this.
        """
        if access is Access.PUBLIC:
            return Caller("", is_admin=False)
        relayed = request.scope.get(RELAYED)
        if isinstance(relayed, Relayed):
            # Another node asked for the key; it speaks for one tenant, and for no administrator.
            if access is not Access.TENANT:
                raise ApiError(403, "admin_only", "not for a request that was passed on")
            return Caller(relayed.tenant, is_admin=False)
        if self._keys is None:
            check_host(request.headers, self.options.address.host)
            return Caller(self._default_tenant, is_admin=True)
        caller = self._keys.caller(key_of(request.headers.get("authorization", "")))
        if caller is None:
            raise ApiError(
                401, "invalid_api_key", "API key: missing or unknown",
                headers={"WWW-Authenticate": 'Bearer realm="kvpack", Basic realm="kvpack"'},
            )  # fmt: skip
        if access is Access.ADMIN and not caller.is_admin:
            raise ApiError(403, "admin_only", "this route needs the key of an administrator")
        return caller

    @contextlib.contextmanager
    def inside(self, endpoint: Endpoint, caller: Caller) -> Iterator[None]:
        """Count a call for as long as the block runs.

        Raises:
            ApiError: 503: the node drains, or too many are inside; 429: too many of its tenant.
        """
        if self._in_flight.now >= IN_FLIGHT_MAX:
            raise unavailable("overloaded", f"{self._in_flight.now} calls are under way")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._in_flight.one())
            if endpoint.computes:
                if self.state is DoorState.DRAINING:
                    raise unavailable("draining", "this node stops; nothing new is begun")
                stack.enter_context(self.quotas.admitted(caller.tenant))
                stack.enter_context(self._computing.one())
            yield

    def refused(self, caller: Caller | None, route: str, refusal: Refusal) -> None:
        """Note a refusal."""
        if self.audit is not None:
            tenant = "" if caller is None else caller.tenant
            self.audit.note(tenant, route, refusal.status, refusal.code)
        _tell(self.refusal_observers, refusal.code)

    def served(self, served: Served) -> None:
        """Tell those who count."""
        _tell(self.observers, served)


def _tell(observers: list[Callable[[_T], None]], what: _T) -> None:
    for observer in observers:
        try:
            observer(what)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said and answered
            # Counting must never cost a caller its answer.
            log.error("a counter failed: %s", unexpected(error))


class Guarded:
    """One endpoint behind the door, as an ASGI application."""

    def __init__(self, door: Door, endpoint: Endpoint) -> None:
        self._door = door
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the call in or refuse it, and see that it is answered once."""
        started_s = time.monotonic()
        told = _Told(send, secrets.token_hex(8))
        try:
            await self._answer(Request(scope, receive, told), told)
        finally:
            status = told.status or CLIENT_GONE
            seconds = time.monotonic() - started_s
            route, method = self._endpoint.path, scope["method"]
            log.info("%s %s %d %.0f ms", method, route, status, 1000 * seconds)
            self._door.served(Served(route, method, status, seconds))

    async def _answer(self, request: Request, told: _Told) -> None:
        door, endpoint = self._door, self._endpoint
        caller: Caller | None = None
        try:
            _check_head(request)
            check_origin(request.headers, door.options.allowed_origins, request.url.scheme)
            caller = door.caller(request, endpoint.access)
            with door.inside(endpoint, caller):
                call = Call(request, door, caller, told.request_id)
                if endpoint.computes and door.state is not DoorState.LOADING:
                    await door.serving.tenants.prepare(caller.tenant)
                answer = await self._handled(call)
                await answer(request.scope, request.receive, told)
        except ClientGone:
            log.info("%s: the client has gone", endpoint.path)
        except KvpackError as error:
            refusal = refusal_of(error)
            door.refused(caller, endpoint.path, refusal)
            if refusal.status >= 500:
                log.warning("%s: %s", endpoint.path, error)
            if told.status is None:
                await refusal.response()(request.scope, request.receive, told)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said and answered
            # Not on to the server: it would log the error's words, which may be the user's.
            log.error("%s: an error of this program: %s", endpoint.path, unexpected(error))
            if told.status is None:
                await broken().response()(request.scope, request.receive, told)

    async def _handled(self, call: Call) -> Answer:
        """What this node answers, or, where another one owns the session, what that one does."""
        relay, scope = self._door.relay, call.request.scope
        if relay is None or RELAYED in scope or self._endpoint.access is not Access.TENANT:
            return await self._endpoint.handler(call)
        scope[KEPT_BODY] = None
        for _ in range(_HERE_MAX):
            try:
                return await self._endpoint.handler(call)
            except KvpackError as error:
                moved = error if isinstance(error, SessionMovedError) else error.__cause__
                if not isinstance(moved, SessionMovedError):
                    raise
                answer = await relay.pass_on(call, moved)
                if answer is None:
                    raise
            if not isinstance(answer, Here):
                return answer
        raise unavailable("session_frozen", "the session is being handed over")


def _check_head(request: Request) -> None:
    """The HTTP parser bounds what is incomplete; this bounds what came at once.

    Raises:
        ApiError: 431.
    """
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size + len(request.scope["raw_path"]) > HEAD_BYTES_MAX:
        raise ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large",
            f"headers: expected at most {HEAD_BYTES_MAX} bytes",
        )  # fmt: skip


class _Told:
    """Passes on what is sent, and remembers the status. Gives each answer what all of them have."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status: int | None = None

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            headers = [*message.get("headers", ()), *_HEADERS]
            headers.append((b"x-request-id", self.request_id.encode()))
            message = {**message, "headers": headers}
        await self._send(message)
