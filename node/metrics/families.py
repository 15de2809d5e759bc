"""A node's status and counters as Prometheus families. Read-only: nothing is counted here.

Names follow Prometheus: a unit at the end, ``_total`` for what only grows. No label holds the name
of a session, a tenant or a peer, and none holds text: label values are words of this program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from node.metrics.histogram import Histogram
from node.metrics.recorder import Recorder
from node.metrics.views import (
    Direction,
    HealthState,
    LadderView,
    LeaseView,
    NodeStatus,
    SlotState,
)
from node.serving.order import MissReason, Rung


def families(status: NodeStatus, recorder: Recorder) -> Iterator[Metric]:
    """Everything that one scrape tells."""
    yield from _node(status)
    yield from _floor(status)
    yield from _sessions(status)
    if status.lease is not None:
        yield from _lease(status.lease)
    yield from _answers(recorder)
    yield from _cache(status.ladder, recorder)
    yield from _moves(status, recorder)
    yield _counter(
        "kvpack_pack_verify_failures",
        "Stored or sent objects that did not verify, by where they came from.",
        ("origin",),
        {
            **{(where,): n for where, n in recorder.verify_failures.items()},
            ("cut",): status.ladder.damaged,
        },
    )


def _node(status: NodeStatus) -> Iterator[Metric]:
    build = GaugeMetricFamily(
        "kvpack_build_info",
        "1, with what this node runs as labels.",
        labels=("version", "model", "encoding"),
    )
    build.add_metric((status.version, status.model, status.encoding), 1)
    yield build
    health = GaugeMetricFamily(
        "kvpack_health", "1 for the state that the node is in, else 0.", labels=("state",)
    )
    for state in HealthState:
        health.add_metric((state.value,), float(state is status.health))
    yield health
    yield _gauge(
        "kvpack_start_time_seconds", "When the node began, seconds since 1970.", status.started_at_s
    )


def _floor(status: NodeStatus) -> Iterator[Metric]:
    floor = status.floor
    slots = GaugeMetricFamily("kvpack_slots", "Slots, by what they do.", labels=("state",))
    for state in SlotState:
        slots.add_metric((state.value,), sum(1 for slot in floor.slots if slot.state is state))
    yield slots
    yield _gauge("kvpack_queue_waiting", "Orders that wait for a slot.", floor.waiting)
    yield _gauge("kvpack_queue_limit", "Orders that may wait for a slot.", floor.waiting_max)
    yield _gauge(
        "kvpack_staging_busy", "1 while a context is being rebuilt.", float(floor.staging_busy)
    )


def _sessions(status: NodeStatus) -> Iterator[Metric]:
    yield _gauge("kvpack_sessions_owned", "Sessions that this node owns.", status.sessions_owned)
    yield _gauge("kvpack_sessions_limit", "Sessions that it may own.", status.sessions_max)
    if status.memory is None:
        return
    rows = GaugeMetricFamily(
        "kvpack_kv_bytes",
        "Bytes of the rows held by sessions and slots, by kind of layer.",
        labels=("layers",),
    )
    positions = status.positions()
    rows.add_metric(("window",), sum(status.memory.ring_bytes(n) for n in positions))
    rows.add_metric(("full",), sum(status.memory.full_bytes(n) for n in positions))
    yield rows


def _lease(lease: LeaseView) -> Iterator[Metric]:
    yield _gauge(
        "kvpack_lease_left_seconds", "Until this node fences itself; 0 where it is over.",
        lease.left_s,
    )  # fmt: skip
    yield _counter(
        "kvpack_fence_refusals",
        "Operations refused since the lease was over or the token was not the current one.",
        ("cause",),
        {("lease_over",): lease.fenced, ("stale_token",): lease.stale},
    )


def _answers(recorder: Recorder) -> Iterator[Metric]:
    yield _counter(
        "kvpack_answers", "Answers, by how they ended.", ("outcome",), _by_word(recorder.runs)
    )
    sources = {rung.value: 0 for rung in Rung if rung is not Rung.NONE}
    tokens = {"computed": 0, **sources, **recorder.prompt_tokens}
    yield _counter(
        "kvpack_prompt_tokens",
        "Prompt tokens of finished answers, by where their rows came from; in all as usage says.",
        ("source",),
        _by_word({word: n for word, n in tokens.items() if word != Rung.NONE.value}),
    )
    yield _counter(
        "kvpack_generated_tokens", "Tokens given out.", (), {(): recorder.generated_tokens}
    )
    yield _histogram(
        "kvpack_first_token_seconds", "From a request to its first token.", (),
        {(): recorder.first_token_s},
    )  # fmt: skip
    yield _histogram(
        "kvpack_queue_seconds", "From a request until it had a slot.", (), {(): recorder.queued_s}
    )
    yield _counter(
        "kvpack_http_answers",
        "HTTP answers, by door and class of status.",
        ("door", "status"),
        recorder.answered,
    )
    yield _counter(
        "kvpack_refusals",
        "What was asked for and not done, by stable word.",
        ("reason",),
        _by_word(recorder.refused),
    )


def _cache(ladder: LadderView, recorder: Recorder) -> Iterator[Metric]:
    yield _counter(
        "kvpack_cache_lookups", "Finished answers that asked for kept rows.", (),
        {(): sum(recorder.lookups.values())},
    )  # fmt: skip
    yield _counter(
        "kvpack_cache_hits",
        "Those that began from kept rows, by where they were held.",
        ("rung",),
        {(rung.value,): recorder.lookups[rung] for rung in Rung if rung is not Rung.NONE},
    )
    yield _counter(
        "kvpack_cache_misses",
        "Finished answers by why not the whole prefix was held; none: nothing was missed.",
        ("reason",),
        {(reason.value,): recorder.misses[reason] for reason in MissReason},
    )
    yield _counter(
        "kvpack_session_continuations", "Answers that went on in a session's live state.", (),
        {(): recorder.continuations},
    )  # fmt: skip
    yield _counter(
        "kvpack_remote_prefills",
        "Long prompts for a producer node: fresh from there, or computed here after all.",
        ("outcome",),
        _by_word(recorder.remote),
    )
    yield _counter(
        "kvpack_cache_restored_bytes", "Plaintext of rows that were brought back.", (),
        {(): recorder.restored_bytes},
    )  # fmt: skip
    yield _counter(
        "kvpack_cache_evictions", "Chunks that made room in memory.", (), {(): ladder.evictions}
    )
    yield _gauge("kvpack_cache_resident_bytes", "Rows held in memory.", ladder.resident_bytes)
    yield _gauge(
        "kvpack_cache_resident_limit_bytes", "What they may take.", ladder.resident_bytes_max
    )
    yield _gauge("kvpack_cuts_pending", "Cuts on their way to the store.", ladder.cuts_pending)
    yield _counter(
        "kvpack_cuts", "Cuts that were due, by what became of them.", ("outcome",),
        {("kept",): ladder.cuts_kept, ("dropped",): ladder.cuts_dropped},
    )  # fmt: skip


def _moves(status: NodeStatus, recorder: Recorder) -> Iterator[Metric]:
    running = GaugeMetricFamily(
        "kvpack_moves_running", "Moves and copies under way.", labels=("direction",)
    )
    for way in Direction:
        running.add_metric((way.value,), sum(1 for move in status.moves if move.direction is way))
    yield running
    yield _counter(
        "kvpack_moves",
        "Moves and copies that have ended, by stable word of what ended them; done: it came about.",
        ("direction", "kind", "outcome"),
        recorder.moves,
    )
    yield _counter(
        "kvpack_move_payload_bytes", "Plaintext sent or received by ended moves.", ("direction",),
        _by_word({way.value: recorder.payload_bytes[way.value] for way in Direction}),
    )  # fmt: skip
    yield _counter(
        "kvpack_move_held_bytes", "Plaintext that a target held and was only told of.", (),
        {(): recorder.held_bytes},
    )  # fmt: skip
    yield _counter(
        "kvpack_move_wire_bytes", "Serialized messages of moves given away, both ways.", (),
        {(): recorder.wire_bytes},
    )  # fmt: skip
    yield _histogram(
        "kvpack_move_phase_seconds",
        "Phases of moves given away; pause: without a token for the user.",
        ("phase",),
        {(name,): histogram for name, histogram in recorder.phases.items()},
    )


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _by_word(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(word,): count for word, count in counts.items()}


def _counter(name: str, words: str, labels: Iterable[str], rows: Mapping[Any, int]) -> Metric:
    """Rows by their label values, in order. ``_total`` is added by the text format."""
    family = CounterMetricFamily(name, words, labels=tuple(labels))
    for values, count in rows.items():
        family.add_metric(values, count)
    return family


def _histogram(
    name: str, words: str, labels: Iterable[str], rows: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    family = HistogramMetricFamily(name, words, labels=tuple(labels))
    for values, histogram in rows.items():
        family.add_metric(values, histogram.buckets(), histogram.sum)
    return family
