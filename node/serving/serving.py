"""What is behind the doors, as one value: routes get nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from node.engine_thread import EngineThread
    from node.migration.depot import Depot
    from node.migration.moves import Moves
    from node.migration.target import Transfers
    from node.serving.options import ServingOptions
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
    """

    name: str
    names: frozenset[str]
    created_s: int
    max_context: int
    vocab_size: int


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
