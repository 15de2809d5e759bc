"""``/kvpack/sessions``: the sessions of this node, as the operator's commands reach them.

List, look, save, restore, migrate, delete. A caller sees its own tenant's; sessions that exist for
one remote prefill are nobody's. What leaves this machine or reads its paths needs an administrator.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from starlette.responses import JSONResponse

from node.config import Address
from node.errors import SessionMovedError, SessionNotFoundError
from node.http.access import Access, Answer, Call, Endpoint
from node.http.errors import ApiError, bad_request
from node.http.hangup import unless_gone
from node.http.packs import folder_of, require_own_rows, written
from node.http.sse import EventStream, event
from node.migration.orders import Order, Progress
from node.migration.park import ParkOrder
from node.migration.report import as_object, result_message
from node.migration.restore import RestoreOrder
from node.save import cut_now
from node.serving.reuse import ForeignTrail
from node.session import Session, check_session_id
from node.transient import is_transient
from node.unpack import unpack

if TYPE_CHECKING:
    from node.pack_folder import PackFolder

#: Inside a data folder: packs that clients asked for.
PACKS: Final = "packs"

PREFIX: Final = "/kvpack/sessions"
_ONE: Final = f"{PREFIX}/{{session}}"

#: Sessions on one page.
PAGE_MAX: Final = 100

#: What begins so has a record of its own, and is deleted together with it.
_CONVERSATION: Final = "conv_"

_STORE: Final = "store:"


class SaveBody(msgspec.Struct):
    """Body of save: a pack under a name, or a copy in a store on this machine.

    Attributes:
        filename: One part of a path; ``ID.kvpack`` by default.
        store: Path of a store's folder instead.
    """

    filename: str | None = None
    store: str | None = None


class RestoreBody(msgspec.Struct):
    """Body of restore.

    Attributes:
        filename: A pack that was saved; ``ID.kvpack`` by default.
        store: Path of a store's folder instead, into which the session was put.
        stored_id: Its name there, if it is to have another one here.
        accept_compatible: A continuation that is not bit-exact will do.
    """

    filename: str | None = None
    store: str | None = None
    stored_id: str | None = None
    accept_compatible: bool = False


class MigrateBody(msgspec.Struct):
    """Body of migrate.

    Attributes:
        to: ``NAME@HOST:PORT`` of a node, or ``store:`` and a path here or a place in a bucket.
        mode: Whether the session goes there, or a copy.
        copy_as: The copy's name there.
        accept: What kind of continuation will do.
        compress: Rows are compressed where that pays: for slow links.
        stream: Tell of the progress, as events.
    """

    to: str
    mode: Literal["move", "copy"] = "move"
    copy_as: str = ""
    accept: Literal["exact", "compatible"] = "exact"
    compress: bool = False
    stream: bool = False


def routes() -> list[Endpoint]:
    """Of this module."""
    return [
        Endpoint(PREFIX, "GET", Access.TENANT, list_sessions),
        Endpoint(_ONE, "GET", Access.TENANT, get_session),
        Endpoint(_ONE, "DELETE", Access.TENANT, delete_session),
        Endpoint(f"{_ONE}/save", "POST", Access.TENANT, save_session, computes=True),
        Endpoint(f"{_ONE}/restore", "POST", Access.TENANT, restore_session, computes=True),
        Endpoint(f"{_ONE}/migrate", "POST", Access.ADMIN, migrate_session),
    ]


async def list_sessions(call: Call) -> Answer:
    """``?after=ID&limit=N``, in order of their names."""
    query = call.request.query_params
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= PAGE_MAX):
        raise bad_request(f"limit: expected 1 to {PAGE_MAX}", param="limit")
    tag, after = _tag(call), query.get("after", "")
    found = sorted(
        (
            one for one in call.serving.sessions.all()
            if one.tenant == tag and one.session_id > after and not is_transient(one.session_id)
        ),
        key=lambda one: one.session_id,
    )  # fmt: skip
    page = [session_object(call, one) for one in found[: int(limit)]]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "has_more": len(found) > len(page),
            "last_id": page[-1]["id"] if page else None,
        }
    )


async def get_session(call: Call) -> Answer:
    """How one stands."""
    return JSONResponse(session_object(call, await _find(call)))


def session_object(call: Call, session: Session) -> dict[str, Any]:
    """A session, without a word of its text."""
    return {
        "id": session.session_id,
        "object": "kvpack.session",
        "node": call.serving.node,
        "phase": session.phase.value,
        "asleep": session.asleep,
        "position": session.position,
        "tokens": session.next_index,
        "revision": session.revision,
        "context_epoch": session.context_epoch,
        "owner_revision": session.token.revision,
    }


async def delete_session(call: Call) -> Answer:
    """Give it up. Its packs stay."""
    name = _name(call)
    if name.startswith(_CONVERSATION):
        raise ApiError(
            HTTPStatus.CONFLICT, "is_conversation",
            f"session {name}: delete it as a conversation: DELETE /v1/conversations/{name}",
        )  # fmt: skip
    session, sessions = await _find(call), call.serving.sessions
    async with sessions.hold(name, session.token) as held:
        await sessions.close(held)
    return JSONResponse({"id": name, "object": "kvpack.session.deleted", "deleted": True})


async def save_session(call: Call) -> Answer:
    """Write it as a pack, or copy it into a store, while it goes on."""
    name, body = _name(call), await call.json(SaveBody)
    session = await _find(call)
    if body.store is not None:
        _require_no_file(body.filename)
        return JSONResponse(await _park(call, session, body.store, copy=True))
    work = _save(call, session, body.filename or f"{name}.kvpack")
    return JSONResponse(await unless_gone(call.request.receive, work))


async def _save(call: Call, session: Session, filename: str) -> dict[str, Any]:
    serving, start = call.serving, time.monotonic()
    sessions, binding = serving.sessions, serving.tenants.binding(call.tenant)
    async with sessions.hold(session.session_id, session.token) as held:
        require_own_rows(held)
        await sessions.work_off(held)
        cut = await cut_now(serving.engine, binding, held)
    # What may change was copied: the session goes on while the rest is read and written.
    file_bytes = await written(serving.engine, binding, cut, _packs(call), filename)
    return {
        "id": session.session_id,
        "filename": filename,
        "n_saved": cut.position,
        "n_written": file_bytes,
        "timings": {"save_ms": _ms(start)},
    }


async def restore_session(call: Call) -> Answer:
    """Open a session that goes on where a pack, or what lies in a store, ends."""
    name, body = _name(call), await call.json(RestoreBody)
    if is_transient(name) or name.startswith(_CONVERSATION):
        raise bad_request(f"session {name}: names like this are made by the node", param="session")
    if body.store is not None:
        _require_no_file(body.filename)
        return JSONResponse(await _restore_stored(call, name, body))
    work = _restore(call, name, body.filename or f"{name}.kvpack", body.accept_compatible)
    return JSONResponse(await unless_gone(call.request.receive, work))


async def _restore(call: Call, name: str, filename: str, accept: bool) -> dict[str, Any]:
    serving, start = call.serving, time.monotonic()
    binding, sessions = serving.tenants.binding(call.tenant), serving.sessions
    file = await asyncio.to_thread(_packs(call).open, filename)
    found = await unpack(serving.engine, binding, file, accept_compatible=accept)
    session = await sessions.open(name, found.decoding)
    try:
        async with sessions.hold(name, session.token):
            session.generation, session.token_ids = found.generation, list(found.token_ids)
            session.tenant = _tag(call)
            session.trail = None if found.exact else ForeignTrail()
            session.restore(found.state)
    except BaseException:
        await sessions.end(session)
        raise
    return {
        **session_object(call, session),
        "filename": filename,
        "continuation": "exact" if found.exact else "compatible",
        "n_restored": found.position,
        "n_read": found.file_bytes,
        "timings": {"restore_ms": _ms(start)},
    }


async def _restore_stored(call: Call, name: str, body: RestoreBody) -> dict[str, Any]:
    _require_operator(call)
    stored = check_session_id(body.stored_id or name)
    as_another = name if stored != name else ""
    order = RestoreOrder(stored, str(body.store), as_another, body.accept_compatible)
    restored = await call.serving.depot.restore(order)
    session = await call.serving.sessions.find(name)
    return {
        **session_object(call, session),
        "store_id": restored.identity.hex(),
        "cut_id": restored.cut_id.hex(),
        "continuation": "exact" if restored.outcome.exact else "compatible",
        "drift": restored.outcome.drift,
        "objects": restored.objects,
        "object_bytes": restored.object_bytes,
    }


async def migrate_session(call: Call) -> Answer:
    """Move or copy it to another node, or into a store; the answer says where it is then.

    A client that hangs up stops watching: the move goes on.
    """
    body = await call.json(MigrateBody)
    session = await _find(call)
    _require_operator(call)
    if (body.mode == "copy" and not body.to.startswith(_STORE)) != bool(body.copy_as):
        raise bad_request("copy_as: expected with a copy to a node, and only then", param="copy_as")
    if body.to.startswith(_STORE):
        place = body.to.removeprefix(_STORE)
        return JSONResponse(await _park(call, session, place, copy=body.mode == "copy"))
    told = _moving(call, session, _order(body))
    if body.stream:
        return EventStream(_as_events(told))
    result: dict[str, Any] = {}
    async with contextlib.aclosing(told):
        async for _, one in told:
            result = one
    return JSONResponse(result)


def _order(body: MigrateBody) -> Order:
    name, at, address = body.to.partition("@")
    if not (name and at):
        expected = "NAME@HOST:PORT, store:PATH or store:s3://BUCKET/PREFIX"
        raise bad_request(f"to: expected {expected}", param="to")
    copy_as = body.copy_as and check_session_id(body.copy_as)
    accepts = body.accept == "compatible"
    return Order(name, Address.parse(address), accepts, copy_as, body.compress)


async def _moving(
    call: Call, session: Session, order: Order
) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
    """``(kind, value)`` of a move; the result comes last. Whoever closes it stops watching."""
    moves = call.serving.moves
    events = moves.start(session.session_id, session.token, (), order)
    async with contextlib.aclosing(events):
        async for one in events:
            if isinstance(one, Progress):
                yield "progress", {"object": "kvpack.progress", **asdict(one)}
            else:
                yield "result", {"object": "kvpack.migration", **as_object(result_message(one))}


async def _as_events(
    told: AsyncGenerator[tuple[str, dict[str, Any]], None],
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(told):
        async for name, value in told:
            yield event(value, name)


async def _park(call: Call, session: Session, place: str, *, copy: bool) -> dict[str, Any]:
    _require_operator(call)
    order = ParkOrder(place, copy)
    parked = await call.serving.depot.park(session.session_id, session.token, order)
    return {
        "object": "kvpack.parked",
        "id": session.session_id,
        "mode": "copy" if copy else "move",
        "store_id": parked.parked.identity.hex(),
        "cut_id": parked.parked.cut_id.hex(),
        "position": parked.parked.position,
        "objects": parked.objects,
        "object_bytes": parked.object_bytes,
        "written_bytes": parked.written_bytes,
    }


async def _find(call: Call) -> Session:
    """The caller's session of that name.

    Raises:
        ApiError: 421 ``session_moved``, with where it is now in the headers.
        SessionNotFoundError: It has none of that name, whatever others have.
    """
    name = _name(call)
    try:
        return await call.serving.sessions.find(name, _tag(call))
    except SessionMovedError as error:
        if _tag(call):
            # Only this node's own tenant has sessions that move.
            raise SessionNotFoundError(f"session {name}: not on this node") from None
        headers = {"x-kvpack-node": error.owner} if error.owner else {}
        if error.address:
            headers["x-kvpack-address"] = error.address
        raise ApiError(
            HTTPStatus.MISDIRECTED_REQUEST, error.reason, str(error), headers=headers
        ) from error  # fmt: skip


def _name(call: Call) -> str:
    return check_session_id(call.request.path_params["session"])


def _tag(call: Call) -> str:
    """How sessions name the caller's tenant: not at all where it is this node's own."""
    return "" if call.tenant == call.serving.tenants.default else call.tenant


def _packs(call: Call) -> PackFolder:
    return folder_of(call, call.serving.data_dir / PACKS)


def _require_operator(call: Call) -> None:
    """Paths of this machine, and other machines, are the operator's; and only its sessions move."""
    if not call.caller.is_admin:
        raise ApiError(HTTPStatus.FORBIDDEN, "admin_only", "this needs an administrator's key")
    if _tag(call):
        raise ApiError(
            HTTPStatus.CONFLICT, "does_not_move", "only sessions of the node's own tenant move"
        )


def _require_no_file(filename: str | None) -> None:
    if filename is not None:
        raise bad_request("filename: expected alone, or a store alone", param="filename")


def _ms(start_s: float) -> float:
    return round(1000 * (time.monotonic() - start_s), 3)
