"""A client of a node: one channel, a deadline on every call, errors of ours instead of gRPC's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import grpc.aio

from node.config import Address
from node.errors import PeerAnswerError, PeerRefusedError, PeerUnavailableError
from node.migration.wire import peer_error
from node.pb.v1 import session_pb2 as pb
from node.pb.v1 import session_pb2_grpc
from node.trust import Role, load_credentials, open_channel

#: Calls that only look.
LOOK_S: Final = 10.0

#: Calls that compute or write: a prompt of any length that a person waits for.
WORK_S: Final = 3600.0


class NodeClient:
    """The Session service of one node, as seen by an enrolled client.

    Raises:
        CredentialsError: The folder is not usable, or the node is not pinned in it.
    """

    def __init__(self, credentials_dir: Path, node: str, address: Address) -> None:
        credentials = load_credentials(credentials_dir)
        self.node = node
        self._place = f"{node} at {address}"
        self._channel = open_channel(credentials, credentials.peer(node, Role.NODE), address)
        self._stub = session_pb2_grpc.SessionStub(self._channel)

    async def __aenter__(self) -> NodeClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def list_sessions(self) -> list[pb.SessionReply]:
        """All sessions that live there."""
        found: list[pb.SessionReply] = []
        after = ""
        while True:
            reply = await self._call(self._stub.List, pb.ListRequest(after=after), LOOK_S)
            found += reply.sessions
            after = reply.next_after
            if not after:
                return found

    async def describe(self) -> pb.DescribeReply:
        """What the node is."""
        reply: pb.DescribeReply = await self._call(
            self._stub.Describe, pb.DescribeRequest(), LOOK_S
        )
        return reply

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``."""
        reply = await self._call(self._stub.Tokenize, pb.TokenizeRequest(text=text), LOOK_S)
        return list(reply.token_ids)

    async def detokenize(self, token_ids: list[int]) -> str:
        """Text of ``token_ids``."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        reply: pb.DetokenizeReply = await self._call(self._stub.Detokenize, request, LOOK_S)
        return reply.text

    async def open(self, session_id: str, sampling: pb.Sampling | None = None) -> pb.SessionReply:
        """Claim a new session there; greedy unless ``sampling`` says otherwise."""
        request = pb.OpenRequest(session_id=session_id, sampling=sampling)
        reply: pb.SessionReply = await self._call(self._stub.Open, request, LOOK_S)
        return reply

    async def get(self, session_id: str) -> pb.SessionReply:
        """How a session stands."""
        reply: pb.SessionReply = await self._call(
            self._stub.Get, pb.GetRequest(session_id=session_id), LOOK_S
        )
        return reply

    async def append(self, session: pb.SessionReply, token_ids: list[int]) -> pb.SessionReply:
        """Prefill tokens."""
        request = pb.AppendRequest(
            session_id=session.session_id, token=session.token, token_ids=token_ids
        )
        reply: pb.SessionReply = await self._call(self._stub.Append, request, WORK_S)
        return reply

    async def save(self, session: pb.SessionReply) -> pb.SaveReply:
        """Write the session as a pack on the node."""
        request = pb.SaveRequest(session_id=session.session_id, token=session.token)
        reply: pb.SaveReply = await self._call(self._stub.Save, request, WORK_S)
        return reply

    async def cancel_move(self, session: pb.SessionReply) -> None:
        """End a move of the session that is under way there."""
        request = pb.CancelMoveRequest(session_id=session.session_id, token=session.token)
        await self._call(self._stub.CancelMove, request, LOOK_S)

    async def park(self, session: pb.SessionReply, store: str, *, copy: bool) -> pb.ParkReply:
        """Move or copy a session into a store on the node's machine."""
        request = pb.ParkRequest(
            session_id=session.session_id, token=session.token, store=store, copy=copy
        )
        reply: pb.ParkReply = await self._call(self._stub.Park, request, WORK_S)
        return reply

    async def restore(self, request: pb.RestoreRequest) -> pb.RestoreReply:
        """Bring a session out of a store to the node."""
        reply: pb.RestoreReply = await self._call(self._stub.Restore, request, WORK_S)
        return reply

    async def fleet(self) -> pb.FleetReply:
        """What the node and those that it may send to say of themselves."""
        reply: pb.FleetReply = await self._call(self._stub.Fleet, pb.FleetRequest(), LOOK_S)
        return reply

    async def leave(self, *, stay: bool = False) -> pb.LeaveReply:
        """Let nothing be opened or placed there from now on; with ``stay`` again."""
        request = pb.LeaveRequest(stay=stay)
        reply: pb.LeaveReply = await self._call(self._stub.Leave, request, LOOK_S)
        return reply

    async def close_session(self, session: pb.SessionReply) -> None:
        """Give the session up."""
        request = pb.CloseRequest(session_id=session.session_id, token=session.token)
        await self._call(self._stub.Close, request, LOOK_S)

    async def generate(
        self, session: pb.SessionReply, resume_index: int, max_tokens: int
    ) -> AsyncIterator[pb.GenerateEvent]:
        """Tokens with their logits."""
        request = pb.GenerateRequest(
            session_id=session.session_id,
            token=session.token,
            resume_index=resume_index,
            max_tokens=max_tokens,
            want_logits=True,
        )
        async for event in self._stream(self._stub.Generate, request):
            yield event

    async def migrate(self, request: pb.MigrateRequest) -> AsyncGenerator[pb.MigrateEvent, None]:
        """Move a session away from the node; the last event is the result."""
        async for event in self._stream(self._stub.Migrate, request):
            yield event

    async def _call(self, call: Any, request: Any, timeout_s: float) -> Any:  # noqa: ANN401
        try:
            return await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, self.node, self._place) from None

    async def _stream(self, call: Any, request: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        try:
            async for event in call(request, timeout=WORK_S):
                yield event
        except grpc.aio.AioRpcError as error:
            raise _error_of(error, self.node, self._place) from None


def _error_of(
    error: grpc.aio.AioRpcError, node: str, place: str
) -> PeerAnswerError | PeerUnavailableError:
    """The error of ours, with what a person can do about silence.

    A gate says no word of why it refuses, but it does answer.
    """
    found = peer_error(error, node)
    if isinstance(found, PeerAnswerError):
        return found
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return PeerAnswerError(
            PeerRefusedError.reason,
            f"node {place}: refused this caller; pin its certificate there: kvnode pin "
            "--credentials THAT-NODE --client THIS-CLIENT/node-cert.pem",
        )
    word = error.code().name.lower()
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return PeerUnavailableError(
            f"node {place}: {word}: nobody answers there, or somebody else than {node}; is it "
            "running, with this --grpc address, and pinned with its present certificate?"
        )
    return PeerUnavailableError(f"node {place}: {word}; its log says why")
