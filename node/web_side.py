"""The web side of a node: its port, open from the first moment, and what is put behind it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from node.http.app import make_app
from node.http.audit import Audit
from node.http.desk import Desk
from node.http.door import Door
from node.http.listen import listening
from node.http.routes import ENDPOINTS
from node.serving.serving import ModelFacts, Serving

if TYPE_CHECKING:
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
    """

    config: ServeConfig
    door: Door
    address: Address

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
            yield cls(config, door, address)

    @contextlib.asynccontextmanager
    async def serving(
        self, node: Node, engine: EngineThread, tenants: Tenants
    ) -> AsyncIterator[None]:
        """Callers reach the model until the block ends; then what runs is finished."""
        facts = model_facts(self.config, engine)
        self.door.open(
            Serving(
                node=node.name,
                data_dir=self.config.data_dir,
                options=self.config.serving,
                facts=facts,
                engine=engine,
                tenants=tenants,
                sessions=node.sessions,
                moves=node.moves,
                transfers=node.transfers,
                depot=node.depot,
                tier=node.tier,
            )
        )
        desk = self.door.desk.over(node, engine, credentials_dir=self.config.credentials_dir)
        try:
            async with desk:
                yield
        finally:
            if not await self.door.drain():
                log.warning("answers were still running after %.0f s", self.door.options.drain_s)


def model_facts(config: ServeConfig, engine: EngineThread) -> ModelFacts:
    """What clients are told of the model."""
    model = engine.model
    limit = model.layout.max_context_tokens
    if config.serving.max_context is not None:
        limit = min(limit, config.serving.max_context)
    names = frozenset({model.name, str(config.model_dir)})
    return ModelFacts(model.name, names, int(time.time()), limit, model.vocab_size)
