"""What the cache did, in one bar and two lists."""

from __future__ import annotations

from typing import Final

from node.metrics.views import NodeStatus
from node.page import units, words
from node.serving.counts import Counts
from node.serving.order import MissReason, Rung

#: From the nearest to the farthest, as the bar shows them; what had to be computed comes last.
_RUNGS: Final = (Rung.CURRENT, Rung.RESIDENT, Rung.DURABLE, Rung.REMOTE)


def reused_share(counts: Counts) -> float | None:
    """Prompt tokens that were not computed here; None while there were none at all."""
    if not counts.prompt_tokens:
        return None
    return 1 - counts.evaluated_tokens / counts.prompt_tokens


def cache_part(status: NodeStatus) -> str:
    """Where prompt tokens came from, why some were missing, and what is kept."""
    kept = _kept(status)
    if not status.counts.prompt_tokens:
        return f'<p class="empty">No prompt has been answered yet.</p>{kept}'
    return f"{_bar(status.counts)}{_misses(status)}{kept}"


def _bar(counts: Counts) -> str:
    total, left = counts.prompt_tokens, 0.0
    pieces, rows = "", ""
    sources = [(rung.value, counts.cached_tokens[rung]) for rung in _RUNGS]
    for source, tokens in (*sources, ("computed", counts.evaluated_tokens)):
        width = 100 * tokens / total
        if tokens:
            pieces += (
                f'<rect class="{source}" x="{left:.2f}" y="0" width="{width:.2f}" height="10"/>'
            )
            rows += (
                f'<li><i class="swatch {source}"></i><b>{words.SOURCES[source]}</b> '
                f"<span>{units.plural(tokens, 'token')}, "
                f"{units.percent_text(tokens / total)}</span></li>"
            )
        left += width
    said = f"{units.percent_text(reused_share(counts) or 0.0)} of prompt tokens were reused"
    return (
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"'
        f' aria-label="{said}">{pieces}</svg><ul class="legend">{rows}</ul>'
    )


def _misses(status: NodeStatus) -> str:
    rows = "".join(
        f"<li>{units.plural(count, 'answer')}: {words.MISSES[reason]}</li>"
        for reason, count in sorted(status.accounts.misses.items(), key=lambda one: -one[1])
        if count and reason is not MissReason.NONE
    )
    return f'<h3>Why something had to be computed</h3><ul class="why">{rows}</ul>' if rows else ""


def _kept(status: NodeStatus) -> str:
    ladder, accounts = status.ladder, status.accounts
    facts = [
        f"{units.bytes_text(ladder.resident_bytes)} of "
        f"{units.bytes_text(ladder.resident_bytes_max)} in memory",
        f"{units.plural(accounts.published, 'cut')} written to disk",
    ]
    if accounts.restored_bytes:
        facts.append(f"{units.bytes_text(accounts.restored_bytes)} of rows brought back")
    if ladder.pending:
        facts.append(f"{units.plural(ladder.pending, 'cut')} on the way")
    if accounts.dropped:
        facts.append(f"{units.plural(accounts.dropped, 'cut')} dropped")
    damaged = f" <b>{accounts.damaged} did not verify.</b>" if accounts.damaged else ""
    return f'<p class="note">{", ".join(facts)}.{damaged}</p>'
