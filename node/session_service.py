"""The Session service: messages to values, calls, values to messages. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc.aio

import kvpack
from kvpack.errors import KvpackError, LimitError
from kvpack.wire import encode_layout
from node.config import Address
from node.dataplane.options import plane_value
from node.migration.depot import Depot
from node.migration.moves import TARGETS_MAX, Moves, OfTarget, Targets
from node.migration.orders import Moved, Order, Progress
from node.migration.park import ParkOrder
from node.migration.restore import RestoreOrder
from node.migration.versions import minors_message
from node.migration.wire import token_message, token_value
from node.pb.v1 import session_pb2 as pb
from node.pb.v1 import session_pb2_grpc
from node.placement.fleet import Fleet, fleet_message
from node.save import cut_now, write_cut
from node.session import Phase, Session, check_session_id
from node.sessions import Sessions
from node.status import refuse
from node.tier import Tier
from node.transient import check_lasting

if TYPE_CHECKING:
    from engine import DecodingState

_Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "node.v1.Session"

#: Sessions on one page of a list.
PAGE_MAX: Final = 1000
PAGE_DEFAULT: Final = 100

#: Events of one Generate.
TOKENS_MAX: Final = 1 << 20

_PHASES: Final = {
    Phase.ACTIVE: pb.SESSION_PHASE_ACTIVE,
    Phase.FROZEN: pb.SESSION_PHASE_FROZEN,
    Phase.GONE: pb.SESSION_PHASE_UNSPECIFIED,
}


def _answering(
    behaviour: Callable[[Any, Any, _Context], Awaitable[Any]],
) -> Callable[[Any, Any, _Context], Awaitable[Any]]:
    @functools.wraps(behaviour)
    async def answer(self: Any, request: Any, context: _Context) -> Any:  # noqa: ANN401
        try:
            return await behaviour(self, request, context)
        except KvpackError as error:
            await refuse(context, error)

    return answer


def _streaming(
    behaviour: Callable[[Any, Any, _Context], AsyncIterator[Any]],
) -> Callable[[Any, Any, _Context], AsyncIterator[Any]]:
    @functools.wraps(behaviour)
    async def answer(self: Any, request: Any, context: _Context) -> AsyncIterator[Any]:  # noqa: ANN401
        try:
            async for event in behaviour(self, request, context):
                yield event
        except KvpackError as error:
            await refuse(context, error)

    return answer


class SessionService(session_pb2_grpc.SessionServicer):
    """What clients call."""

    def __init__(
        self,
        sessions: Sessions,
        moves: Moves,
        packs_dir: Path,
        depot: Depot,
        tier: Tier | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self._depot = depot
        self._fleet = fleet
        self._sessions = sessions
        self._tier = tier
        self._moves = moves
        self._packs_dir = packs_dir

    @_answering
    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeReply:
        model = self._sessions.engine.model
        return pb.DescribeReply(
            node=self._sessions.node,
            pid=os.getpid(),
            model=model.name,
            layout=encode_layout(model.layout),
            vocab_size=model.vocab_size,
            window_tokens=model.window_tokens,
            version=kvpack.__version__,
            protocol=minors_message(self._moves.source.speaks),
        )

    @_answering
    async def Tokenize(self, request: pb.TokenizeRequest, context: _Context) -> pb.TokenizeReply:
        # Beside the engine's thread, whose calls are others' tokens.
        model = self._sessions.engine.model
        return pb.TokenizeReply(token_ids=await asyncio.to_thread(model.encode, request.text))

    @_answering
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: _Context
    ) -> pb.DetokenizeReply:
        model = self._sessions.engine.model
        ids = list(request.token_ids)
        if ids and max(ids) >= model.vocab_size:
            raise LimitError("token_ids", f"ids below {model.vocab_size}", "an id outside")
        return pb.DetokenizeReply(text=await asyncio.to_thread(model.decode, ids))

    @_answering
    async def List(self, request: pb.ListRequest, context: _Context) -> pb.ListReply:
        size = min(request.page_size or PAGE_DEFAULT, PAGE_MAX)
        page, next_after = self._sessions.page(request.after, size)
        return pb.ListReply(sessions=[_reply(one) for one in page], next_after=next_after)

    @_answering
    async def Open(self, request: pb.OpenRequest, context: _Context) -> pb.SessionReply:
        decoding = decoding_of(request.sampling) if request.HasField("sampling") else None
        name = check_lasting(request.session_id)
        return _reply(await self._sessions.open(name, decoding))

    @_answering
    async def Get(self, request: pb.GetRequest, context: _Context) -> pb.SessionReply:
        return _reply(await self._sessions.find(request.session_id))

    @_answering
    async def Append(self, request: pb.AppendRequest, context: _Context) -> pb.SessionReply:
        token = token_value(request.token)
        async with self._sessions.hold(request.session_id, token) as session:
            await self._sessions.append(session, request.token_ids)
            return _reply(session)

    @_streaming
    async def Generate(
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateEvent]:
        steps = self._sessions.generate(
            request.session_id,
            token_value(request.token),
            request.resume_index,
            min(request.max_tokens, TOKENS_MAX),
        )
        async for token, decoded in steps:
            keep = request.want_logits and decoded.logits is not None
            yield pb.GenerateEvent(
                index=decoded.index,
                token_id=decoded.token_id,
                logits=decoded.logits.data if keep and decoded.logits is not None else b"",
                token=token_message(token),
            )

    @_streaming
    async def Migrate(
        self, request: pb.MigrateRequest, context: _Context
    ) -> AsyncIterator[pb.MigrateEvent]:
        if request.targets:
            async for told in self._fan_out(request):
                yield told
            return
        copy_as = request.copy_as and check_session_id(request.copy_as)
        address = Address.parse(request.target_address)
        order = Order(
            request.target_node, address, request.accept_compatible, copy_as, request.compress,
            plane_value(request.data_plane),
        )  # fmt: skip
        if request.transient:
            events = self._moves.lend(request.session_id, request.token_ids, order)
        else:
            events = self._moves.start(
                request.session_id, token_value(request.token), request.token_ids, order
            )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Progress):
                    yield pb.MigrateEvent(progress=_progress(event))
                else:
                    yield pb.MigrateEvent(result=_result(event))

    async def _fan_out(self, request: pb.MigrateRequest) -> AsyncIterator[pb.MigrateEvent]:
        events = self._moves.fan_out(
            request.session_id,
            token_value(request.token),
            request.token_ids,
            targets_of(request),
        )
        async for told in events:
            yield _of_target(told)

    @_answering
    async def CancelMove(
        self, request: pb.CancelMoveRequest, context: _Context
    ) -> pb.CancelMoveReply:
        self._moves.cancel(request.session_id, token_value(request.token))
        return pb.CancelMoveReply()

    @_answering
    async def Save(self, request: pb.SaveRequest, context: _Context) -> pb.SaveReply:
        sessions = self._sessions
        async with sessions.hold(request.session_id, token_value(request.token)) as session:
            await sessions.work_off(session)
            cut = await cut_now(sessions.engine, self._moves.binding, session)
        # What may change was copied: the session goes on while the rest is read and written.
        path = self._packs_dir / f"{request.session_id}.{cut.position}.kvpack"
        saved = await write_cut(sessions.engine, self._moves.binding, cut, path)
        if self._tier is not None:
            own = not cut.generation.is_mixed
            self._tier.keep_later(request.session_id, saved.path, own=own)
        return pb.SaveReply(
            path=str(saved.path), file_bytes=saved.file_bytes, position=saved.position
        )

    @_answering
    async def Park(self, request: pb.ParkRequest, context: _Context) -> pb.ParkReply:
        order = ParkOrder(request.store, request.copy)
        parked = await self._depot.park(request.session_id, token_value(request.token), order)
        reply = pb.ParkReply(
            store_id=parked.parked.identity,
            cut_id=parked.parked.cut_id,
            position=parked.parked.position,
            objects=parked.objects,
            object_bytes=parked.object_bytes,
            written_bytes=parked.written_bytes,
        )
        if parked.token is not None:
            reply.token.CopyFrom(token_message(parked.token))
        return reply

    @_answering
    async def Restore(self, request: pb.RestoreRequest, context: _Context) -> pb.RestoreReply:
        order = RestoreOrder(
            check_session_id(request.session_id),
            request.store,
            request.restore_as and check_lasting(check_session_id(request.restore_as)),
            request.accept_compatible,
        )
        restored = await self._depot.restore(order)
        return pb.RestoreReply(
            session=_reply(await self._sessions.find(order.name)),
            store_id=restored.identity,
            cut_id=restored.cut_id,
            continuation_verdict="exact" if restored.outcome.exact else "compatible",
            drift=restored.outcome.drift,
            objects=restored.objects,
            object_bytes=restored.object_bytes,
        )

    @_answering
    async def Fleet(self, request: pb.FleetRequest, context: _Context) -> pb.FleetReply:
        if self._fleet is None:
            return pb.FleetReply()
        return fleet_message(await self._fleet.look())

    @_answering
    async def Leave(self, request: pb.LeaveRequest, context: _Context) -> pb.LeaveReply:
        self._sessions.leaving = not request.stay
        if self._fleet is not None:
            self._fleet.poke()
        others = sum(1 for one in self._sessions.all() if one.tenant)
        return pb.LeaveReply(other_tenants_sessions=others)

    @_answering
    async def Close(self, request: pb.CloseRequest, context: _Context) -> pb.CloseReply:
        token = token_value(request.token)
        async with self._sessions.hold(request.session_id, token) as session:
            await self._sessions.close(session)
        return pb.CloseReply()


def _reply(session: Session) -> pb.SessionReply:
    return pb.SessionReply(
        session_id=session.session_id,
        token=token_message(session.token),
        position=session.position,
        next_index=session.next_index,
        phase=_PHASES[session.phase],
        revision=session.revision,
        context_epoch=session.context_epoch,
        told_index=session.told_index,
    )


def decoding_of(sampling: pb.Sampling) -> DecodingState:
    """The state before the first choice.

    Raises:
        LimitError: Names the parameter, its range and what was given.
    """
    from engine import DecodingState, SamplerState, SamplingParameters

    given = {
        name: getattr(sampling, name)
        for name in ("top_p", "repetition_penalty", "penalty_window_tokens")
        if sampling.HasField(name)
    }
    parameters = SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        **given,
    )
    seed = sampling.seed if sampling.HasField("seed") else None
    return DecodingState(SamplerState.begin(parameters, seed))


def targets_of(request: pb.MigrateRequest) -> Targets:
    """The orders of a request for several targets.

    Raises:
        LimitError: Too many, a name twice or missing, or a single target beside them.
    """
    single = request.target_node or request.target_address or request.copy_as
    if single:
        raise LimitError("targets", "no target beside them", single)
    return Targets(
        tuple(
            Order(
                one.node,
                Address.parse(one.address),
                request.accept_compatible,
                check_session_id(one.copy_as),
                request.compress,
                plane_value(request.data_plane),
            )
            for one in request.targets[: TARGETS_MAX + 1]
        )
    )


def _of_target(told: OfTarget) -> pb.MigrateEvent:
    event = told.event
    if isinstance(event, Progress):
        return pb.MigrateEvent(progress=_progress(event), target=told.number)
    if isinstance(event, Moved):
        return pb.MigrateEvent(result=_result(event), target=told.number)
    failure = pb.MigrateFailure(
        target_node=event.order.target,
        session_id=event.order.copy_as,
        reason=event.error.reason,
        detail=str(event.error),
    )
    return pb.MigrateEvent(failure=failure, target=told.number)


def _progress(progress: Progress) -> pb.MigrateProgress:
    return pb.MigrateProgress(
        step=progress.step,
        computed_tokens=progress.computed_tokens,
        total_tokens=progress.total_tokens,
        sent_payload_bytes=progress.sent_payload_bytes,
        total_payload_bytes=progress.total_payload_bytes,
    )


def _result(moved: Moved) -> pb.MigrateResult:
    from node.migration.report import result_message

    return result_message(moved)
