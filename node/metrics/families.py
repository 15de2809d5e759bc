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
    LeaseView,
    NodeStatus,
)
from node.serving.health import HealthState
from node.serving.order import MissReason, Rung
from node.serving.slots import SlotState


def families(status: NodeStatus, recorder: Recorder) -> Iterator[Metric]:
    """Everything that one scrape tells."""
    yield from _node(status)
    yield from _floor(status)
    yield from _sessions(status)
    if status.lease is not None:
        yield from _lease(status.lease)
    yield from _answers(status)
    yield from _waiting(status)
    yield from _doors(recorder)
    yield from _cache(status)
    yield from _remote(status)
    yield from _moves(status, recorder)
    yield _counter(
        "kvpack_pack_verify_failures",
        "Stored or sent objects that did not verify, by where they came from.",
        ("origin",),
        {
            **{(where,): n for where, n in recorder.verify_failures.items()},
            ("cut",): status.accounts.damaged,
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
    yield _gauge("kvpack_staging_busy", "1 while a context is being rebuilt.", float(floor.staging))


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


def _answers(status: NodeStatus) -> Iterator[Metric]:
    counts = status.counts
    yield _counter(
        "kvpack_answers_submitted", "Answers that were taken on.", (), {(): counts.submitted}
    )
    yield _counter(
        "kvpack_answers",
        "Answers that are over, by how they ended.",
        ("outcome",),
        _by_word(
            {
                "finished": counts.finished,
                "cancelled": counts.cancelled,
                "stalled": counts.stalled,
                "failed": counts.failed,
                "refused": counts.refused,
            }
        ),
    )
    cached = {rung.value: n for rung, n in counts.cached_tokens.items() if rung is not Rung.NONE}
    yield _counter(
        "kvpack_prompt_tokens",
        "Tokens of answered prompts, by where their rows came from; in all as usage says.",
        ("source",),
        _by_word({"computed": counts.evaluated_tokens, **cached}),
    )
    yield _counter(
        "kvpack_prefilled_tokens", "Prompt tokens computed, also for answers that did not finish.",
        (), {(): counts.prefilled_tokens},
    )  # fmt: skip
    yield _counter(
        "kvpack_generated_tokens", "Tokens generated, also of answers that did not finish.",
        (), {(): counts.generated_tokens},
    )  # fmt: skip
    yield _counter(
        "kvpack_context_rebuilds", "Contexts of sessions that were rebuilt and swapped in.",
        (), {(): counts.rebuilds},
    )  # fmt: skip


def _waiting(status: NodeStatus) -> Iterator[Metric]:
    counts = status.counts
    yield _histogram(
        "kvpack_queue_seconds", "From an order until it has a slot.", (), {(): counts.queued_s}
    )
    yield _histogram(
        "kvpack_first_token_seconds", "From an order to its first token.",
        (), {(): counts.first_token_s},
    )  # fmt: skip


def _doors(recorder: Recorder) -> Iterator[Metric]:
    yield _counter(
        "kvpack_http_answers",
        "HTTP answers, by door and class of status.",
        ("door", "status"),
        recorder.answered,
    )
    yield _histogram(
        "kvpack_http_seconds", "From the head of a request to the last byte of its answer.",
        ("door",), {(door,): seconds for door, seconds in recorder.answer_s.items()},
    )  # fmt: skip
    yield _counter(
        "kvpack_refusals",
        "What was asked for and not done, by stable word.",
        ("reason",),
        _by_word(recorder.refused),
    )


def _cache(status: NodeStatus) -> Iterator[Metric]:
    accounts, ladder = status.accounts, status.ladder
    yield _counter(
        "kvpack_cache_lookups", "How often it was asked where an answer can begin.", (),
        {(): sum(accounts.begun.values())},
    )  # fmt: skip
    yield _counter(
        "kvpack_cache_hits",
        "How often kept rows were begun from, by where they were held.",
        ("rung",),
        {(rung.value,): accounts.begun[rung] for rung in (Rung.RESIDENT, Rung.DURABLE)},
    )
    yield _counter(
        "kvpack_cache_misses",
        "By why not the whole prefix was held; none: nothing was missed but new tokens.",
        ("reason",),
        {(reason.value,): accounts.misses[reason] for reason in MissReason},
    )
    yield _counter(
        "kvpack_session_continuations", "Answers that went on in a live state. No cache hits.", (),
        {(): status.counts.continuations},
    )  # fmt: skip
    restored = accounts.restored_bytes - accounts.memory_bytes
    yield _counter(
        "kvpack_cache_restored_bytes",
        "Plaintext of rows that were brought back, by manifests, and from where.",
        ("rung",),
        {("resident",): accounts.memory_bytes, ("durable",): restored},
    )
    yield _counter(
        "kvpack_cache_evictions", "Kept cuts that went, by why.", ("cause",),
        {("no_room",): accounts.evicted, ("superseded",): accounts.superseded},
    )  # fmt: skip
    yield _gauge("kvpack_cache_resident_bytes", "Rows held in memory.", ladder.resident_bytes)
    yield _gauge(
        "kvpack_cache_resident_limit_bytes", "What they may take.", ladder.resident_bytes_max
    )
    yield _gauge("kvpack_cuts_pending", "Cuts on their way to the store.", ladder.pending)
    yield _counter(
        "kvpack_cuts", "Cuts that were due, by what became of them.", ("outcome",),
        {("published",): accounts.published, ("dropped",): accounts.dropped},
    )  # fmt: skip
    yield _counter(
        "kvpack_cuts_written_bytes", "Bytes of chunks that were written for cuts.", (),
        {(): accounts.published_bytes},
    )  # fmt: skip


def _remote(status: NodeStatus) -> Iterator[Metric]:
    """Fresh remote prefills are no hits: they stand apart."""
    remote = status.remote
    rows = {"arrived": 0} if remote is None else {"arrived": remote.arrived}
    if remote is not None:
        rows |= {reason.value: count for reason, count in remote.fallbacks.items()}
    yield _counter(
        "kvpack_remote_prefills",
        "Prompts for a producer node: arrived from there, or why they were computed here.",
        ("outcome",),
        _by_word(rows),
    )
    yield _counter(
        "kvpack_remote_prefill_bytes", "Plaintext of rows that a producer node computed.", (),
        {(): 0 if remote is None else remote.row_bytes},
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
