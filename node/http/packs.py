"""Packs that clients of HTTP name: where they are, and how one is written."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from node.errors import ConsentError
from node.pack_folder import PackFolder, tenant_folder
from node.save import HeldCut, write_pack

if TYPE_CHECKING:
    from node.binding import PackBinding
    from node.engine_thread import EngineThread
    from node.http.access import Call
    from node.stream import Stream


def folder_of(call: Call, root: Path) -> PackFolder:
    """The caller's packs below ``root``."""
    return PackFolder(tenant_folder(root, call.tenant, call.serving.tenants.default))


def require_own_rows(stream: Stream) -> None:
    """Refuse rows that other numerics computed: a pack would be no build's own.

    Raises:
        ConsentError: They are such rows.
    """
    if stream.generation.is_mixed:
        raise ConsentError("rows that another build computed go on here, but are not saved again")


async def written(
    engine: EngineThread, binding: PackBinding, cut: HeldCut, folder: PackFolder, name: str
) -> int:
    """Write ``cut`` as the pack ``name``, in the place of one of that name; gives its bytes.

    Raises:
        LimitError: No name for a pack.
        UsageError: Something else has that name.
        PublishError: The volume refuses. What was there before still is.
    """
    async with contextlib.AsyncExitStack() as stack:
        publication = folder.write(name)
        sink = await asyncio.to_thread(publication.__enter__)

        async def leave(*raised: object) -> bool | None:
            return await asyncio.to_thread(publication.__exit__, *raised)  # type: ignore[arg-type]

        stack.push_async_exit(leave)
        return await write_pack(engine, binding, cut, sink)
