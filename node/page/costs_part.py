"""What kept rows cost and save on this node: four measured facts, each with what it is of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from node.economics.summary import Economy, Saving
from node.economics.values import Tier
from node.metrics.views import NodeStatus
from node.page import units

_TIERS: Final = {Tier.MEMORY: "memory", Tier.DISK: "disk"}


def costs_part(status: NodeStatus) -> str:
    """Prefill rate, restore time, cost of a miss, break-even."""
    economy = status.economy
    if economy is None:
        return '<p class="empty">This node keeps no rows, so there is nothing to compare.</p>'
    facts = "".join(f"<li><b>{name}</b> <span>{said}</span></li>" for name, said in _facts(economy))
    if not facts:
        return (
            '<p class="empty">Nothing was measured yet: it begins with the first prompt whose '
            "rows are kept.</p>"
        )
    return f'<ul class="legend">{facts}</ul>{_note(economy)}'


def _facts(economy: Economy) -> Iterator[tuple[str, str]]:
    """What it is, and how much."""
    rate = economy.rate
    if rate is not None:
        measured = f"{units.plural(rate.tokens, 'token')} of {units.plural(rate.cuts, 'cut')}"
        yield "Prefill", f"{units.rate_text(rate.tokens_per_s)} tokens/s over {measured}"
    for saving in economy.savings:
        where = _TIERS[saving.tier]
        rows = f"{units.plural(saving.tokens, 'token')}, {units.bytes_text(saving.state_bytes)}"
        taken = f"{units.seconds_text(saving.restore_s)} for {rows}{_median(saving)}"
        yield f"Restore from {where}", taken
        if saving.miss_s is None or saving.prefill_s is None:
            continue
        yield "A miss there", _miss(saving.miss_s, saving.prefill_s)
        if saving.break_even_tokens is not None:
            pays = units.plural(saving.break_even_tokens, "token")
            yield "Break-even", f"{pays}: as many are computed in the time of that restore"


def _median(saving: Saving) -> str:
    return f", median of {saving.restores}" if saving.restores > 1 else ", once"


def _miss(miss_s: float, prefill_s: float) -> str:
    taken = f"computing them took {units.seconds_text(prefill_s)}"
    if miss_s < 0:
        return f"saves {units.seconds_text(-miss_s)}: {taken}"
    return f"costs {units.seconds_text(miss_s)} more: {taken}"


def _note(economy: Economy) -> str:
    lacking = []
    if economy.rate is None:
        lacking.append("no prefill")
    if not economy.savings:
        lacking.append("no restore")
    elif all(saving.prefill_s is None for saving in economy.savings):
        lacking.append("no cut both computed and brought back")
    more = f" Not measured yet: {', '.join(lacking)}." if lacking else ""
    said = "Measured on this node. Each cut: <code>kvnode economics</code>."
    return f'<p class="note">{said}{more}</p>'
