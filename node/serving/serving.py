"""What is behind the doors, as one value: routes get nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from node.chat.render import Renderer
    from node.chat.transcripts import Transcripts
    from node.engine_thread import EngineThread
    from node.migration.depot import Depot
    from node.migration.moves import Moves
    from node.migration.target import Transfers
    from node.records import Records
    from node.serving.conversations import Conversations
    from node.serving.dormancy import Dormancy
    from node.serving.floor import Floor
    from node.serving.ladder import RowLadder
    from node.serving.options import ServingOptions
    from node.serving.remote import RemotePrefill
    from node.sessions import Sessions
    from node.tenants import Tenants
    from node.tier import Tier


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What clients are told of the model.

    Attributes:
        name: Its folder's name.
        names: What else it may be called: the path it was started with.
        created_s: When it was loaded, in seconds since 1970.
        max_context: Tokens of a context at most.
        vocab_size: Number of logits.
        fingerprint: Short digest of model and numerics: equal seeds give equal answers only where
            it is equal.
    """

    name: str
    names: frozenset[str]
    created_s: int
    max_context: int
    vocab_size: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Serving:
    """A node that serves. Everything in it outlives every request.

    Attributes:
        node: Its name.
        data_dir: Its own files.
        options: What it was told.
        facts: The model, for clients.
        engine: The model, for calls.
        tenants: Keys and bindings.
        sessions: What it owns.
        moves: What goes out.
        transfers: What comes in.
        depot: What goes into stores and comes back.
        tier: The store of cuts; None where nothing is kept.
        floor: Slots.
        ladder: Who keeps rows; None where nothing is kept.
        remote: The producer of long prompts; None: all are computed here.
        renderer: From messages to token ids.
        transcripts: Exact ids of conversations that clients send back as text.
        token_bytes: The bytes that a token stands for.
        records: What was answered, over restarts.
        conversations: Sessions whose text is remembered.
        dormancy: Who gives rows of idle ones back; None where nothing is kept.
    """

    node: str
    data_dir: Path
    options: ServingOptions
    facts: ModelFacts
    engine: EngineThread
    tenants: Tenants
    sessions: Sessions
    moves: Moves
    transfers: Transfers
    depot: Depot
    tier: Tier | None
    floor: Floor
    ladder: RowLadder | None
    remote: RemotePrefill | None
    renderer: Renderer
    transcripts: Transcripts
    token_bytes: Callable[[int], bytes]
    records: Records
    conversations: Conversations
    dormancy: Dormancy | None
