"""The page's parts as HTML, each by the id of the place where it stands.

All that comes from outside this program passes :func:`esc`. There is no inline style and no inline
script: the policy that the page is served under allows neither.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Final

from node.metrics.recorder import Recorder
from node.metrics.views import (
    Direction,
    EndedMove,
    MoveView,
    NodeStatus,
    NodeView,
    SessionView,
    Standing,
)
from node.page import units, words
from node.page.cache_part import cache_part, reused_share
from node.page.costs_part import costs_part
from node.page.plot import memory_plot
from node.serving.slots import SlotState
from node.serving.view import SlotView
from node.transient import is_transient

esc: Final = html.escape

#: Ended moves that are still shown, and for how long.
ENDED_SHOWN: Final = 4
ENDED_FOR_S: Final = 600.0


def fragments(status: NodeStatus, recorder: Recorder) -> dict[str, str]:
    """Every part, by id."""
    return {name: part(status, recorder) for name, part in PARTS.items()}


def _health(status: NodeStatus, _: Recorder) -> str:
    state = status.health
    detail = f" <span>{esc(status.why)}</span>" if status.why else ""
    return f'<b class="pill {state.value}">{words.HEALTH[state]}</b>{detail}'


def _facts(status: NodeStatus, _: Recorder) -> str:
    facts = [f"up {units.seconds_text(status.uptime_s)}", f"kvpack {esc(status.version)}"]
    if status.model:
        facts.insert(0, f"<b>{esc(status.model)}</b> in {esc(_encoding(status.encoding))}")
    return " &middot; ".join(facts)


def _tiles(status: NodeStatus, recorder: Recorder) -> str:
    floor = status.floor
    queue = f"{floor.waiting} waiting" if floor.waiting else "nobody waits"
    if floor.staging:
        queue += ", one context is rebuilt"
    busy = sum(1 for slot in floor.slots if slot.state is not SlotState.IDLE)
    lease = status.lease
    standing = "no lease"
    if lease is not None:
        standing = f"lease {units.seconds_text(lease.left_s)}" if lease.left_s else "fenced"
    share = reused_share(status.counts)
    tiles = (
        ("Speed", units.rate_text(status.tokens_per_s), "tokens/s", "over 5 seconds"),
        ("Slots", f"{busy} / {len(floor.slots)}", "busy", queue),
        ("Sessions", str(status.sessions_owned), f"of {status.sessions_max}", standing),
        ("Reused", "&ndash;" if share is None else units.percent_text(share), "",
         "of all prompt tokens"),
    )  # fmt: skip
    return "".join(
        f'<div class="tile"><h2>{name}</h2><p class="big">{value} <small>{unit}</small></p>'
        f"<p>{note}</p></div>"
        for name, value, unit, note in tiles
    )


def _moves(status: NodeStatus, recorder: Recorder) -> str:
    now_s = recorder.clock_s()
    ended = [one for one in reversed(recorder.last_moves) if now_s - one.at_s < ENDED_FOR_S]
    if not status.moves and not ended:
        return '<p class="empty">Nothing is on its way.</p>'
    under_way = "".join(_move(move) for move in status.moves)
    rows = "".join(_ended(one, now_s) for one in ended[:ENDED_SHOWN])
    return under_way + (f'<ul class="ended">{rows}</ul>' if rows else "")


def _move(move: MoveView) -> str:
    way = "to" if move.direction is Direction.OUT else "from"
    name, title = _what_moves(move.session_id, move.copy)
    facts = [
        f"{units.bytes_text(move.done_bytes)} of {units.bytes_text(move.total_bytes)}",
        f"{units.bytes_text(move.bytes_per_s)}/s",
    ]
    if move.left_s is not None:
        left = f"{units.seconds_text(move.left_s)} left" if move.left_s else "all sent"
        facts.append(left if move.direction is Direction.OUT or move.left_s else "all received")
    return (
        f'<article class="move"><h3>{title} {name} {way} <b>{esc(move.peer)}</b></h3>'
        f'<progress max="{max(1, move.total_bytes)}" value="{move.done_bytes}"'
        f' aria-label="{esc(title)} {way} {esc(move.peer)}"></progress>'
        f"<p>{esc(words.step_words(move.direction, move.step))}</p>"
        f"<p>{' &middot; '.join(facts)}</p></article>"
    )


def _ended(move: EndedMove, now_s: float) -> str:
    name, title = _what_moves(move.session_id, move.copy)
    way = "to" if move.direction is Direction.OUT else "from"
    when = units.ago_text(now_s - move.at_s)
    if move.reason:
        said = f"did not come about. {esc(words.refusal_words(move.reason))}"
        mark = '<i class="mark bad" aria-label="failed"></i>'
    else:
        said = f"done: {units.bytes_text(move.payload_bytes)}"
        said += f" in {units.seconds_text(move.took_s)}" if move.took_s else ""
        if move.pause_s is not None:
            said += f", {units.seconds_text(move.pause_s)} without a token"
        mark = '<i class="mark good" aria-label="done"></i>'
    return (
        f"<li>{mark}<span>{title} {name} {way} <b>{esc(move.peer)}</b> {said}"
        f" <time>{when}</time></span></li>"
    )


def _what_moves(session_id: str, copy: bool) -> tuple[str, str]:
    if is_transient(session_id):
        return "", "Remote prefill"
    return f"<code>{esc(session_id)}</code>", "Copy of" if copy else "Move of"


def _slots(status: NodeStatus, _: Recorder) -> str:
    if not status.floor.slots:
        return '<p class="empty">No slots yet.</p>'
    return "".join(_slot(slot) for slot in status.floor.slots)


def _slot(slot: SlotView) -> str:
    if slot.state is SlotState.PREFILL and slot.prompt_tokens:
        done, of = units.count_text(slot.computed_tokens), units.count_text(slot.prompt_tokens)
        more = (
            f'<progress max="{slot.prompt_tokens}" value="{slot.computed_tokens}"'
            f' aria-label="prompt"></progress><p>{done} of {of} tokens</p>'
        )
    elif slot.state is SlotState.BEGIN:
        more = f"<p>for a prompt of {units.plural(slot.prompt_tokens, 'token')}</p>"
    elif slot.prompt_tokens:
        more = (
            f"<p>{units.plural(slot.generated_tokens, 'token')} after a prompt of "
            f"{units.count_text(slot.prompt_tokens)}</p>"
        )
    else:
        held = slot.computed_tokens
        said = f"{units.plural(held, 'token')} held" if held else "empty"
        more = f"<p>{said}</p>"
    return (
        f'<div class="slot {slot.state.value}"><h3>Slot {slot.index}</h3>'
        f'<p class="state">{words.SLOTS[slot.state]}</p>{more}</div>'
    )


def _memory(status: NodeStatus, _: Recorder) -> str:
    if status.memory is None:
        return '<p class="empty">Known once the model is loaded.</p>'
    return memory_plot(status.memory, status.positions())


def _sessions(status: NodeStatus, _: Recorder) -> str:
    if not status.sessions:
        return '<p class="empty">None yet. A conversation appears here once a client opens one.</p>'
    rows = "".join(_session(one, status) for one in status.sessions)
    left_out = status.sessions_owned - sum(
        1 for one in status.sessions if one.standing is not Standing.ELSEWHERE
    )
    more = f'<p class="note">and {left_out} more</p>' if left_out > 0 else ""
    return (
        '<table class="cards"><thead><tr><th scope="col">Session</th><th scope="col">Owner</th>'
        '<th scope="col">State</th><th scope="col" class="n">Tokens</th>'
        '<th scope="col" class="n">Rows in memory</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}"
    )


def _session(session: SessionView, status: NodeStatus) -> str:
    here = session.standing is not Standing.ELSEWHERE
    tokens = units.count_text(session.tokens) if here else "&ndash;"
    held = "&ndash;"
    if here and session.position and status.memory is not None:
        rings = status.memory.ring_bytes(session.position)
        held = units.bytes_text(rings + status.memory.full_bytes(session.position))
    owner = f"{esc(session.owner)}" + (" <small>this node</small>" if here else "")
    state = words.STANDINGS[session.standing]
    if session.context_epoch:
        state += f", context shifted {units.plural(session.context_epoch, 'time')}"
    return (
        f'<tr class="{session.standing.value}"><th scope="row"><code>{esc(session.session_id)}'
        f'</code></th><td data-label="Owner">{owner}</td><td data-label="State">{state}</td>'
        f'<td data-label="Tokens" class="n">{tokens}</td>'
        f'<td data-label="Rows in memory" class="n">{held}</td></tr>'
    )


def _nodes(status: NodeStatus, _: Recorder) -> str:
    return "<ul>" + "".join(_node(one) for one in status.nodes) + "</ul>"


def _node(node: NodeView) -> str:
    badge = " <small>this node</small>" if node.is_self else ""
    facts = []
    if node.sessions is not None:
        facts.append(units.plural(node.sessions, "session"))
    mark = "unknown"
    if node.lease_left_s is None:
        facts.append("the directory does not say more" if not node.is_self else "no lease yet")
    elif node.lease_left_s > 0:
        mark = "good"
        facts.append(f"lease runs {units.seconds_text(node.lease_left_s)} more")
    else:
        mark = "bad"
        facts.append("no running lease: it is down, or was never up")
    address = f"<code>{esc(node.address)}</code> " if node.address else ""
    return (
        f'<li><i class="mark {mark}"></i><span><b>{esc(node.name)}</b>{badge}<br>'
        f"{address}{', '.join(facts)}</span></li>"
    )


def _refusals(_: NodeStatus, recorder: Recorder) -> str:
    if not recorder.last_refusals:
        return '<p class="empty">Nothing was refused.</p>'
    now_s = recorder.clock_s()
    rows = ""
    for reason, same in groupby(reversed(recorder.last_refusals), key=lambda one: one.reason):
        alike = list(same)
        times = f" <b>{len(alike)} times</b>" if len(alike) > 1 else ""
        rows += (
            f"<li><span>{esc(words.refusal_words(reason))}{times} <code>{esc(reason)}</code> "
            f"<time>{units.ago_text(now_s - alike[0].at_s)}</time></span></li>"
        )
    return f"<ul>{rows}</ul>"


def _encoding(encoding: str) -> str:
    return {"f16le": "16-bit floats", "bf16le": "bfloat16", "f32le": "32-bit floats"}.get(
        encoding, encoding
    )


#: By the id of their places, in the order of the page.
PARTS: Final[Mapping[str, Callable[[NodeStatus, Recorder], str]]] = {
    "health": _health,
    "facts": _facts,
    "tiles": _tiles,
    "moves": _moves,
    "slots": _slots,
    "memory": _memory,
    "sessions": _sessions,
    "nodes": _nodes,
    "cache": lambda status, _: cache_part(status),
    "costs": lambda status, _: costs_part(status),
    "refusals": _refusals,
}
