"""What is put behind the web door of a node: slots, ladder, text, records. Made here, ended here.

The order of the ends is that of what they need: answers end first, then cuts become durable, then
what was remembered is closed; the engine outlives all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from kvpack.wire import encode_numerics
from node.chat.render import Renderer
from node.config import Address
from node.economics.book import Book
from node.errors import UsageError
from node.records import Records
from node.serving.conversations import Conversations
from node.serving.dormancy import Dormancy
from node.serving.floor import Floor
from node.serving.ladder import RowLadder
from node.serving.options import PrefillAt
from node.serving.producer import ProducerOrder
from node.serving.reuse import Ladder, NoReuse
from node.serving.serving import ModelFacts, Serving
from node.serving.transcripts import KeptTranscripts

if TYPE_CHECKING:
    from node.config import ServeConfig
    from node.engine_thread import EngineThread
    from node.server import Node
    from node.serving.remote import RemotePrefill
    from node.sessions import Sessions
    from node.tenants import Tenants

log = logging.getLogger(__name__)

#: Inside a data folder: what the node remembers of its clients.
RECORDS: Final = "records.sqlite"

#: And how long cuts took to compute and to bring back.
ECONOMICS: Final = "economics.sqlite"

#: How long answers that are still running after the drain have to end: one engine call.
_END_S: Final = 0.0


@dataclass(frozen=True, slots=True)
class Remembering:
    """What outlives a restart, beside packs and cuts.

    Attributes:
        records: What was answered.
        conversations: Whose sessions are remembered.
    """

    records: Records
    conversations: Conversations


@contextlib.asynccontextmanager
async def remembering(
    config: ServeConfig, sessions: Sessions, tenant: str
) -> AsyncIterator[Remembering]:
    """The records, until the block ends. Opened before sessions are recovered.

    Raises:
        RecordsError: They cannot be used.
    """
    records = await asyncio.to_thread(Records, config.data_dir / RECORDS)
    try:
        yield Remembering(records, Conversations(records, sessions, tenant))
    finally:
        await records.close()


@contextlib.asynccontextmanager
async def behind(
    config: ServeConfig,
    node: Node,
    engine: EngineThread,
    tenants: Tenants,
    remembered: Remembering,
) -> AsyncIterator[Serving]:
    """All that routes get, until the block ends.

    Raises:
        UsageError: ``--producer`` is not one.
        ModelFolderError: The model's tokens do not stand for bytes of text.
        CredentialsError: The producer is not pinned.
        RecordsError: What is remembered cannot be read.
    """
    conversations = remembered.conversations
    async with contextlib.AsyncExitStack() as stack:
        rows = _keep_rows(stack, config, node, engine, tenants)
        remote = _remote(config, node)
        if remote is not None:
            stack.push_async_callback(remote.close)
        await conversations.start()
        dormancy = _let_sleep(stack, node, tenants, rows, conversations)
        ladder = _ladder(engine, tenants, rows, remote)
        floor = Floor(engine, ladder, node.sessions, slots=config.serving.slots)
        floor.start()
        stack.push_async_callback(floor.close, _END_S)
        yield Serving(
            node=node.name,
            data_dir=config.data_dir,
            options=config.serving,
            facts=model_facts(config, engine),
            engine=engine,
            tenants=tenants,
            sessions=node.sessions,
            moves=node.moves,
            transfers=node.transfers,
            depot=node.depot,
            tier=node.tier,
            floor=floor,
            ladder=rows,
            remote=remote,
            renderer=Renderer(engine.model),
            transcripts=KeptTranscripts(remembered.records),
            token_bytes=engine.model.token_bytes(),
            records=remembered.records,
            conversations=conversations,
            dormancy=dormancy,
        )


def _keep_rows(
    stack: contextlib.AsyncExitStack,
    config: ServeConfig,
    node: Node,
    engine: EngineThread,
    tenants: Tenants,
) -> RowLadder | None:
    """Who keeps rows, if this node keeps any: until the stack ends."""
    if node.tier is None:
        return None
    book = Book(config.data_dir / ECONOMICS)
    rows = RowLadder(
        engine, tenants.binding, node.tier.store, config.store, config.serving.cache_bytes,
        busy=lambda: engine.pace.is_busy, book=book,
    )  # fmt: skip
    rows.start()
    # Closed after it: what is still measured is still written down.
    stack.push_async_callback(asyncio.to_thread, book.close)
    stack.push_async_callback(rows.close)
    return rows


def _ladder(
    engine: EngineThread, tenants: Tenants, rows: RowLadder | None, remote: RemotePrefill | None
) -> Ladder:
    """All rungs that this node has."""
    kept: Ladder = NoReuse(engine) if rows is None else rows
    if remote is None:
        return kept
    from node.serving.remote_ladder import RemoteLadder

    return RemoteLadder(kept, remote, tenants.default)


def _let_sleep(
    stack: contextlib.AsyncExitStack,
    node: Node,
    tenants: Tenants,
    rows: RowLadder | None,
    conversations: Conversations,
) -> Dormancy | None:
    """Who gives rows of idle conversations back, where they can be kept: until the stack ends."""
    if rows is None:
        return None
    dormancy = Dormancy(node.sessions, rows, tenants.default, conversations.may_sleep)
    dormancy.start()
    stack.push_async_callback(dormancy.close)
    return dormancy


def model_facts(config: ServeConfig, engine: EngineThread) -> ModelFacts:
    """What clients are told of the model."""
    model = engine.model
    limit = model.layout.max_context_tokens
    if config.serving.max_context is not None:
        limit = min(limit, config.serving.max_context)
    digest = blake3(encode_numerics(model.numerics()))
    digest.update(model.identity("facts").weights_digest)
    return ModelFacts(
        model.name,
        frozenset({model.name, str(config.model_dir)}),
        int(time.time()),
        limit,
        model.vocab_size,
        f"fp_{digest.hexdigest(5)}",
    )


def _remote(config: ServeConfig, node: Node) -> RemotePrefill | None:
    options, credentials_dir = config.serving, config.credentials_dir
    if options.prefill is not PrefillAt.REMOTE or options.producer is None:
        return None
    if node.address is None or credentials_dir is None:
        raise UsageError("--prefill remote: needs --grpc and --credentials, to be reached back")
    name, at, where = options.producer.partition("@")
    if not at or not name:
        raise UsageError(f"--producer {options.producer!r}: expected NAME@HOST:PORT")
    address = Address.parse(where)
    order = ProducerOrder(name, address, node.address, min_tokens=options.remote_tokens_min)
    # Not at the top: a node that computes all of its prompts imports nothing of it.
    from node.client import NodeClient
    from node.credentials import Role, load_credentials
    from node.serving.remote import RemotePrefill

    # A producer that is not pinned is found at the start, not at the first prompt.
    load_credentials(credentials_dir).peer(name, Role.NODE)
    return RemotePrefill(
        order, lambda: NodeClient(credentials_dir, name, address), node.transfers, node.sessions
    )
