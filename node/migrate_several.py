"""What ``kvnode migrate --mode copy`` does where several targets are named."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvpack.errors import EXIT_FAILURE, EXIT_GOOD, LimitError
from node.dataplane.options import Plane, plane_message
from node.errors import PeerUnavailableError, UsageError
from node.follow import FollowingClient
from node.migrate import place, show
from node.migration.moves import TARGETS_MAX
from node.migration.report import as_object
from node.pb.v1 import session_pb2 as pb
from node.session import check_session_id

_MIB: Final = 1 << 20

_Ended = pb.MigrateResult | pb.MigrateFailure


@dataclass(frozen=True, slots=True)
class CopiesOrder:
    """Options of ``kvnode migrate --mode copy`` with several targets.

    Attributes:
        session_id: The session.
        node: Where it is, or was.
        targets: Where copies go.
        credentials_dir: A client's.
        copy_as: The copies are called this, with ``-1``, ``-2`` and so on in the targets' order.
        accept_compatible: A continuation that is not bit-exact will do.
        as_json: One object a line instead of tables.
        compress: Rows are compressed where that saves 3 % or more.
        data_plane: Where chunks travel, if targets let them; None: as the node was set up.
    """

    session_id: str
    node: str
    targets: tuple[str, ...]
    credentials_dir: Path
    copy_as: str
    accept_compatible: bool
    as_json: bool
    compress: bool = False
    data_plane: Plane | None = None

    def __post_init__(self) -> None:
        if len(self.targets) > TARGETS_MAX:
            raise UsageError(f"--to: at most {TARGETS_MAX} targets, not {len(self.targets)}")
        try:
            for session_id in (self.session_id, *self.names):
                check_session_id(session_id)
        except LimitError as error:
            raise UsageError(str(error)) from error

    @property
    def names(self) -> tuple[str, ...]:
        """Of the copies."""
        return tuple(f"{self.copy_as}-{number + 1}" for number in range(len(self.targets)))

    def places(self, other_than: str) -> Iterator[pb.MigrateTarget]:
        """The targets with their names resolved."""
        for target, name in zip(self.targets, self.names, strict=True):
            node, address = place(target, self.credentials_dir, other_than)
            yield pb.MigrateTarget(node=node, address=str(address), copy_as=name)


async def copy_to_several(order: CopiesOrder) -> int:
    """Copy a session to several nodes; prints what became of each.

    Returns:
        0 only if every copy came about.

    Raises:
        KvpackError: Nothing was begun.
    """
    name, address = place(order.node, order.credentials_dir)
    targets = list(order.places(name))
    async with FollowingClient(order.credentials_dir, name, address) as following:
        session = await following.find(order.session_id)
        request = pb.MigrateRequest(
            session_id=order.session_id,
            token=session.token,
            accept_compatible=order.accept_compatible,
            targets=targets,
            compress=order.compress,
            data_plane=plane_message(order.data_plane),
        )
        ended: list[_Ended] = []
        with _bars(targets) as update:
            async for event in following.client.migrate(request):
                which = event.WhichOneof("event")
                if which == "progress":
                    update(event.target, event.progress)
                elif which is not None:
                    ended.append(event.result if which == "result" else event.failure)
    if len(ended) != len(targets):
        raise PeerUnavailableError(f"node {name}: told of {len(ended)} of {len(targets)} targets")
    for one in ended:
        _print(one, order.as_json)
    good = all(isinstance(one, pb.MigrateResult) for one in ended)
    return EXIT_GOOD if good else EXIT_FAILURE


@contextlib.contextmanager
def _bars(
    targets: list[pb.MigrateTarget],
) -> Iterator[Callable[[int, pb.MigrateProgress], None]]:
    """A bar for each target, where there is a terminal."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.fields[node]:<12} {task.description:<10}"), BarColumn(),
        TextColumn("{task.fields[sent]}"), TimeElapsedColumn(), console=console,
        disable=not console.is_terminal, transient=True,
    ) as bars:  # fmt: skip
        tasks: list[TaskID] = [bars.add_task("preparing", node=t.node, sent="") for t in targets]

        def update(number: int, now: pb.MigrateProgress) -> None:
            bars.update(
                tasks[number], description=now.step, completed=now.sent_payload_bytes,
                total=max(1, now.total_payload_bytes),
                sent=f"{now.sent_payload_bytes / _MIB:.1f} MiB",
            )  # fmt: skip

        yield update


def _print(one: _Ended, as_json: bool) -> None:
    if isinstance(one, pb.MigrateResult):
        if as_json:
            print(json.dumps(as_object(one)))
        else:
            show(one)
        return
    if as_json:
        failed = {"target_node": one.target_node, "session_id": one.session_id}
        print(json.dumps({**failed, "failed": one.reason, "detail": one.detail}))
    else:
        print(f"kvnode: error: {one.session_id}: {one.detail}", file=sys.stderr)
