"""The web side of a node: its port, open from the first moment, and what is put behind it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from node.behind import Remembering, behind
from node.http.app import make_app
from node.http.audit import Audit
from node.http.desk import Desk
from node.http.door import Door
from node.http.listen import listening
from node.http.routes import ENDPOINTS

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from node.config import Address, ServeConfig
    from node.engine_thread import EngineThread
    from node.server import Node
    from node.tenants import TenantKeys, Tenants

log = logging.getLogger(__name__)

#: Inside a data folder: what was refused.
AUDIT: Final = "refusals.jsonl"


@dataclass(frozen=True, slots=True)
class Entrance:
    """A port that is open.

    Attributes:
        config: What the node was told.
        door: Who comes in.
        address: Where it is, with the port that it got.
        app: The routes behind the door.
    """

    config: ServeConfig
    door: Door
    address: Address
    app: ASGIApp

    @property
    def url(self) -> str:
        """As clients are told it, without a path."""
        scheme = "http" if self.door.options.tls_certificate is None else "https"
        return f"{scheme}://{self.address}"

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, config: ServeConfig, keys: TenantKeys, node: str
    ) -> AsyncIterator[Entrance]:
        """The port, answering "loading", until the block ends.

        Raises:
            ListenError: It cannot be bound.
            CredentialsError: Keys or certificates cannot be used.
        """
        if config.http is None:
            raise RuntimeError("asked for a port without options")
        door = Door(config.http, keys.default)
        door.desk = Desk(node, door)
        door.audit = audit = Audit(config.data_dir / AUDIT)
        audit.start()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(audit.close)
            app = make_app(door, ENDPOINTS)
            address = await stack.enter_async_context(listening(config.http, app))
            door.desk.watcher.address = str(address)
            yield cls(config, door, address, app)

    @contextlib.asynccontextmanager
    async def serving(
        self,
        node: Node,
        engine: EngineThread,
        tenants: Tenants,
        remembered: Remembering,
    ) -> AsyncIterator[None]:
        """Callers reach the model until the block ends; then what runs is finished.

        Raises:
            KvpackError: What :func:`node.behind.behind` raises.
        """
        config = self.config
        async with behind(config, node, engine, tenants, remembered) as serving:
            desk = self.door.desk.over(
                node,
                engine,
                serving.floor,
                serving.ladder,
                resident_bytes_max=config.serving.cache_bytes,
                remote=None if serving.remote is None else serving.remote.counts,
                credentials_dir=config.credentials_dir,
            )
            async with desk:
                self.door.open(serving)
                try:
                    yield
                finally:
                    if not await self.door.drain():
                        drain_s = self.door.options.drain_s
                        log.warning("answers were still running after %.0f s", drain_s)
