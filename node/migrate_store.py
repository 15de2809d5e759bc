"""What ``kvnode migrate --to store:PATH`` and ``kvnode session restore`` do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpack.errors import EXIT_GOOD, LimitError
from kvpack.store.errors import StoreError
from kvpack.store.places import shown
from node.client import NodeClient
from node.errors import UsageError
from node.follow import FollowingClient
from node.migrate import place
from node.migration.wire import token_value
from node.pb.v1 import session_pb2 as pb
from node.s3.place import SCHEME as S3_SCHEME
from node.s3.place import S3Place
from node.session import check_session_id

#: How a store is told from a node's address.
SCHEME = "store:"


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Options of both commands.

    Attributes:
        session_id: Which session.
        node: Which node to ask.
        store: ``store:`` and the folder's path on that node's machine, or ``s3://…``.
        credentials_dir: The client's folder.
        as_json: Print JSON.

    Raises:
        UsageError: No session's id, or no ``store:PATH`` with an absolute path.
    """

    session_id: str
    node: str
    store: str
    credentials_dir: Path
    as_json: bool

    def __post_init__(self) -> None:
        try:
            check_session_id(self.session_id)
        except LimitError as error:
            raise UsageError(str(error)) from error
        if not self.store.startswith((f"{SCHEME}/", f"{SCHEME}{S3_SCHEME}")):
            raise UsageError(
                f"{shown(self.store)[:200]!r}: expected {SCHEME}PATH, absolute, on the node's "
                f"machine, or {SCHEME}{S3_SCHEME}BUCKET/PREFIX"
            )
        if self.store.startswith(f"{SCHEME}{S3_SCHEME}"):
            _check_bucket(self.path)

    @property
    def path(self) -> str:
        """The folder on the node's machine, or the place in a bucket."""
        return self.store.removeprefix(SCHEME)


def _check_bucket(url: str) -> None:
    """Refuse here what no node could open: it may hold what should not travel.

    Raises:
        UsageError: No ``s3://BUCKET/PREFIX``.
    """
    try:
        S3Place.parse(url)
    except StoreError as error:
        raise UsageError(str(error)) from error


async def park_session(order: StoreOrder, *, copy: bool) -> int:
    """Move or copy a session into a store; prints where it lies.

    Raises:
        KvpackError: It did not come about; the message says where the session is.
    """
    name, address = place(order.node, order.credentials_dir)
    async with FollowingClient(order.credentials_dir, name, address) as following:
        session = await following.find(order.session_id)
        reply = await following.client.park(session, order.path, copy=copy)
    found: dict[str, Any] = {
        "session_id": order.session_id,
        "mode": "copy" if copy else "move",
        "store_id": reply.store_id.hex(),
        "cut_id": reply.cut_id.hex(),
        "position": reply.position,
        "objects": reply.objects,
        "object_bytes": reply.object_bytes,
        "written_bytes": reply.written_bytes,
        "token": _token(reply.token) if reply.HasField("token") else None,
    }
    what = "a copy of {session_id}" if copy else "{session_id}"
    line = what + " lies in store {store_id}: {position} tokens, {written_bytes} bytes written"
    print(json.dumps(found) if order.as_json else line.format(**found))
    return EXIT_GOOD


async def restore_session(order: StoreOrder, restore_as: str, *, accept_compatible: bool) -> int:
    """Bring a session out of a store to a node; prints how it continues there.

    Raises:
        KvpackError: It did not come about; the session lies where it lay.
    """
    name, address = place(order.node, order.credentials_dir)
    request = pb.RestoreRequest(
        session_id=order.session_id,
        store=order.path,
        restore_as=restore_as,
        accept_compatible=accept_compatible,
    )
    async with NodeClient(order.credentials_dir, name, address) as client:
        reply = await client.restore(request)
    found: dict[str, Any] = {
        "session_id": reply.session.session_id,
        "node": name,
        "store_id": reply.store_id.hex(),
        "cut_id": reply.cut_id.hex(),
        "next_index": reply.session.next_index,
        "state_verdict": "exact",
        "continuation_verdict": reply.continuation_verdict,
        "drift": reply.drift,
        "objects": reply.objects,
        "object_bytes": reply.object_bytes,
        "token": _token(reply.session.token),
    }
    line = "{session_id} on {node}: {next_index} tokens, continuation {continuation_verdict}"
    if reply.continuation_verdict != "exact":
        line += ", drift {drift:.3g}"
    print(json.dumps(found) if order.as_json else line.format(**found))
    return EXIT_GOOD


def _token(message: Any) -> dict[str, Any]:  # noqa: ANN401 - any message of a token
    token = token_value(message)
    return {
        "directory_id": token.directory_id.hex(),
        "generation": token.generation,
        "revision": token.revision,
    }
