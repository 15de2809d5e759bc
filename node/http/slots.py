"""``/slots`` and ``/props`` as llama-server's users know them: a thin alias over packs.

A slot holds the context of its last answer. It can be saved as a pack, brought back from one, and
erased. A pack is the caller's tenant's: it opens for nobody else, on nobody else's model.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import JSONResponse

import kvpack
from node.errors import OverloadedError
from node.http.access import Access, Answer, Call, Endpoint
from node.http.errors import ApiError, bad_request, not_found, unavailable
from node.http.hangup import unless_gone
from node.http.packs import folder_of, require_own_rows, written
from node.save import cut_stream
from node.serving.reuse import ForeignTrail
from node.serving.slots import Held, Slot, SlotState
from node.stream import Stream
from node.unpack import unpack

if TYPE_CHECKING:
    from node.pack_folder import PackFolder
    from node.serving.serving import Serving
    from node.serving.view import SlotView

#: How long an action waits for the answer that is made in its slot.
WAIT_S: Final = 10.0
_LOOK_S: Final = 0.02


class SlotFile(msgspec.Struct):
    """Body of save and restore.

    Attributes:
        filename: One part of a path, in the folder of ``--slot-save-path``.
        accept_compatible: Rows that another build computed will do, too.
    """

    filename: str
    accept_compatible: bool = False


def routes() -> list[Endpoint]:
    """Of this module."""
    return [
        Endpoint("/slots", "GET", Access.ADMIN, list_slots),
        Endpoint("/slots/{slot}", "POST", Access.TENANT, act, computes=True),
        Endpoint("/props", "GET", Access.TENANT, props),
    ]


async def list_slots(call: Call) -> Answer:
    """All of them; with ``fail_on_no_slot=1`` 503 where none is free."""
    view = call.serving.floor.status()
    free = any(slot.state is SlotState.IDLE for slot in view.slots)
    if call.request.query_params.get("fail_on_no_slot") == "1" and not free:
        raise unavailable("no_slot", "no slot is free")
    return JSONResponse([slot_object(call.serving, slot) for slot in view.slots])


def slot_object(serving: Serving, slot: SlotView) -> dict[str, Any]:
    """One slot as llama-server shows it, without a word of its text."""
    processing = slot.state not in (SlotState.IDLE, SlotState.LENT)
    return {
        "id": slot.index,
        "n_ctx": serving.facts.max_context,
        "speculative": False,
        "is_processing": processing,
        "state": slot.state.value,
        "n_tokens": slot.known_tokens,
        "n_past": slot.computed_tokens,
        "n_prompt_tokens": slot.prompt_tokens,
        "next_token": {"has_next_token": processing, "n_decoded": slot.generated_tokens},
    }


async def props(call: Call) -> Answer:
    """What clients of llama-server ask first."""
    serving = call.serving
    answer = serving.options.answer
    parameters = {
        "n_predict": answer.max_tokens,
        "temperature": answer.temperature,
        "top_p": answer.top_p,
        "top_k": answer.top_k,
        "min_p": answer.min_p,
    }
    context = serving.facts.max_context
    return JSONResponse(
        {
            "default_generation_settings": {"n_ctx": context, "params": parameters},
            "total_slots": len(serving.floor.status().slots),
            "model_path": serving.facts.name,
            "model_alias": serving.facts.name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"kvpack {kvpack.__version__}",
        }
    )


async def act(call: Call) -> Answer:
    """``?action=save|restore|erase``."""
    serving = call.serving
    serving.floor.health.require()
    index = _index(serving, call.request.path_params["slot"])
    action = call.request.query_params.get("action", "")
    if action == "erase":
        return JSONResponse(await _erase(call, index))
    if action not in ("save", "restore"):
        raise bad_request(
            f"action: expected save, restore or erase, found {action[:20]!r}", param="action"
        )
    folder = _folder(call)
    order = await call.json(SlotFile)
    work = _save if action == "save" else _restore
    done = await unless_gone(call.request.receive, work(call, index, folder, order))
    return JSONResponse(done)


async def _save(call: Call, index: int, folder: PackFolder, order: SlotFile) -> dict[str, Any]:
    serving, start = call.serving, time.monotonic()
    binding = serving.tenants.binding(call.tenant)
    async with _lent(serving, index) as slot:
        stream = _own(slot, call.tenant).stream
        require_own_rows(stream)
        cut = await cut_stream(serving.engine, binding, stream)
    # What may change was copied: the slot makes answers again while the rest is written.
    file_bytes = await written(serving.engine, binding, cut, folder, order.filename)
    return {
        "id_slot": index,
        "filename": order.filename,
        "n_saved": cut.position,
        "n_written": file_bytes,
        "timings": {"save_ms": _ms(start)},
    }


async def _restore(call: Call, index: int, folder: PackFolder, order: SlotFile) -> dict[str, Any]:
    serving, start = call.serving, time.monotonic()
    binding = serving.tenants.binding(call.tenant)
    file = await asyncio.to_thread(folder.open, order.filename)
    found = await unpack(serving.engine, binding, file, accept_compatible=order.accept_compatible)
    vocab_size = serving.facts.vocab_size
    stream = Stream(found.generation, found.token_ids, vocab_size, found.decoding)
    if not found.exact:
        # A cut of it would say that these rows are of this node's numerics.
        stream.trail = ForeignTrail()
    async with _lent(serving, index) as slot:
        slot.hold(Held(call.tenant, stream))
    return {
        "id_slot": index,
        "filename": order.filename,
        "n_restored": found.position,
        "n_read": found.file_bytes,
        "timings": {"restore_ms": _ms(start)},
    }


async def _erase(call: Call, index: int) -> dict[str, Any]:
    erased = 0
    async with _lent(call.serving, index) as slot:
        # Of another tenant's context not even that it is there: the answer is an empty slot's.
        if slot.held is not None and slot.held.tenant == call.tenant:
            erased = slot.held.stream.position
            slot.hold(None)
    return {"id_slot": index, "n_erased": erased}


@contextlib.asynccontextmanager
async def _lent(serving: Serving, index: int) -> AsyncIterator[Slot]:
    """The slot, once the answer that is made in it is over.

    Raises:
        OverloadedError: That takes too long.
    """
    end = time.monotonic() + WAIT_S
    async with contextlib.AsyncExitStack() as stack:
        while True:
            try:
                slot = await stack.enter_async_context(serving.floor.lend(index))
                break
            except OverloadedError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(_LOOK_S)
        yield slot


def _own(slot: Slot, tenant: str) -> Held:
    """What the slot holds, if it is this tenant's. Of another's not even that it is there."""
    if slot.held is None or slot.held.tenant != tenant:
        raise ApiError(
            HTTPStatus.CONFLICT, "slot_empty", f"slot {slot.index}: nothing of yours is in it"
        )
    return slot.held


def _index(serving: Serving, text: str) -> int:
    count = len(serving.floor.status().slots)
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) < count):
        raise not_found(f"slot: expected 0 to {count - 1}", param="slot", code="slot_not_found")
    return int(text)


def _folder(call: Call) -> PackFolder:
    root = call.serving.options.slot_save_path
    if root is None:
        raise ApiError(
            HTTPStatus.NOT_IMPLEMENTED, "not_supported",
            "this node saves no slots: start it with --slot-save-path DIR",
        )  # fmt: skip
    return folder_of(call, root)


def _ms(start_s: float) -> float:
    return round(1000 * (time.monotonic() - start_s), 3)
