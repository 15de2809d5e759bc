"""A draft's cache beside its target's, and again from what a pack holds of it.

What leaves is :meth:`engine.generation.Generation.snapshot` of the draft, and its schedule. In a
pack its rows are chunks of the draft's own identity and layout, gated as the target's are
(docs/spec/kvpack-v1.md, section 7); the token ids are the target's.
"""

from __future__ import annotations

from engine.generation import Generation
from engine.install import require_continuable
from engine.model import Model
from kvpack.errors import LayoutMismatchError
from kvpack.identity import CallSchedule, require_same_layout
from kvpack.snapshot import SessionCacheSnapshot


def install_draft(
    model: Model, snapshot: SessionCacheSnapshot, schedule: CallSchedule, position: int
) -> Generation:
    """The detached draft of ``snapshot``, for a target at ``position``.

    It becomes live together with its target, by the one assignment of a
    :class:`engine.speculative.LivePair`. Whose rows they are is its caller's to compare: the
    identity stands in the pack's draft component.

    Args:
        model: The draft model.
        snapshot: Its rows.
        schedule: The calls that computed them.
        position: Where the target stands.

    Raises:
        LayoutMismatchError: The draft stood elsewhere, or the rows are not of this model's shape.
    """
    if snapshot.position != position:
        raise LayoutMismatchError("draft.position", position, snapshot.position)
    require_same_layout(model.layout, snapshot.layout)
    require_continuable(snapshot.producer)
    installer = model.installer(position)
    for tile in snapshot.tiles:
        installer.scatter(tile)
    return installer.finish(schedule)
