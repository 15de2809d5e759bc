"""The rung below all others: a producer node computes what nobody keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from node.serving.order import Rung
from node.serving.producer import Failure
from node.serving.remote import RemotePrefill
from node.serving.reuse import Base, ForeignTrail, Ladder, Trail

if TYPE_CHECKING:
    from node.stream import Stream


class RemoteLadder:
    """A ladder whose last rung is a producer node: it computes what nobody keeps.

    Args:
        kept: The rungs of this node.
        remote: The producer.
        tenant: Whose prompts it may be given: the one whose key both nodes have.
    """

    def __init__(self, kept: Ladder, remote: RemotePrefill, tenant: str) -> None:
        self._kept = kept
        self._remote = remote
        self._tenant = tenant

    async def begin(
        self, tenant: str, token_ids: Sequence[int], *, reuse: bool = True, above: int = 0
    ) -> Base:
        """The deepest state held here, or rows from the producer where much is missing."""
        base = await self._kept.begin(tenant, token_ids, reuse=reuse, above=above)
        missing = len(token_ids) - 1 - max(above, base.position)
        if tenant != self._tenant or missing < self._remote.order.min_tokens:
            return base
        outcome = await self._remote.prefill(token_ids)
        if isinstance(outcome, Failure):
            return dataclasses.replace(base, fallback=outcome.kind)
        return Base(
            outcome.generation,
            len(token_ids) - 1,
            Rung.REMOTE,
            base.miss,
            outcome.row_bytes,
            exact=outcome.exact,
        )

    def trail(self, tenant: str, stream: Stream, base: Base | None) -> Trail:
        """A trail that keeps nothing where rows are not of this node's numerics."""
        if base is not None and not base.exact:
            return ForeignTrail()
        return self._kept.trail(tenant, stream, base)
