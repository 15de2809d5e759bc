"""What the door knows of requests that are passed on. Imports nothing of HTTP or gRPC."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

#: Where the door finds who is meant, in the scope of a request that did not come over HTTP. No
#: request over HTTP can have it: uvicorn makes scopes of its own.
RELAYED: Final = "kvpack.relayed"


@dataclass(frozen=True, slots=True)
class Relayed:
    """For whom a request was passed on, and by which node."""

    tenant: str
    node: str


class Here(enum.Enum):
    """The session is this node's by now: ask here again."""

    HERE = "here"
