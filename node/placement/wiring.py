"""Placement in a running node: the notice is kept while the node serves, and gone when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from node.placement.describing import Describing, default_kv_bytes, kind_of
from node.placement.fleet import Fleet
from node.placement.publishing import Publisher

if TYPE_CHECKING:
    from node.binding import PackBinding
    from node.config import ServeConfig
    from node.credentials import CredentialsSource
    from node.server import Node

log = logging.getLogger(__name__)

#: Hosts that say "everywhere": nobody can connect to them from elsewhere.
_EVERYWHERE: Final = frozenset({"0.0.0.0", "::", "*"})  # noqa: S104 - compared, not bound


@contextlib.asynccontextmanager
async def placed(
    config: ServeConfig, node: Node, binding: PackBinding, live: CredentialsSource
) -> AsyncIterator[Fleet]:
    """The fleet as ``node`` knows it, which knows of ``node`` until the block ends."""
    address = config.advertise or node.address
    if address is None:
        raise RuntimeError("a node without an address has no place")
    capacity = default_kv_bytes() if config.kv_bytes is None else config.kv_bytes
    url = "" if node.entrance is None else node.entrance.url
    describing = Describing(node.sessions, kind_of(binding), binding.layout, capacity, address, url)
    directory = node.sessions.directory
    publisher = Publisher(directory, describing.now, node.sessions.lease.ttl_s)
    fleet = Fleet(directory, live, describing.now, publisher)
    if address.host in _EVERYWHERE:
        log.warning("no session is placed here: --advertise says where others reach %s", address)
        yield fleet
        return
    publishing = asyncio.create_task(publisher.run())
    try:
        yield fleet
    finally:
        publishing.cancel()
        await asyncio.wait({publishing})
        await publisher.close()
