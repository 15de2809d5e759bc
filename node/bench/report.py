"""What a measurement comes to: one flat object, and the same as a page for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Final

from kvpack.chunk import ChunkClass
from node.bench.geometry import cut_bytes, window_bytes
from node.bench.measure import PREFILL_OVER_TRANSFER, Measured
from node.bench.order import BenchOrder, Kind
from node.bench.sealed import Cost, Pushed, Round

_GIGA: Final = 1e9

_PREFILL_CALL_TOKENS: Final = 512

#: design.md, section 9: allowances of the hand-over's bound.
_TAIL_FACTOR: Final = 1.2
_ALLOWED_S: Final = 0.010


def as_values(measured: Measured) -> dict[str, Any]:
    """Every number, by name; the unit is the name's last word."""
    order, pushed, moved = measured.order, measured.pushed, measured.moved
    timeline, ended = moved.timeline, measured.ended
    sizes = cut_bytes(order.layout, moved.position + 1, order.held_tokens)
    nope, swa = timeline.bytes_of(ChunkClass.FULL), timeline.bytes_of(ChunkClass.SWA)
    return {
        "tokens": order.tokens,
        "held_tokens": order.held_tokens,
        "moved_tokens": moved.position + 1,
        "kind": order.kind.value,
        "layout": order.layout_name,
        "rows": "made" if order.rows is None else "sample",
        "compressed": order.compress,
        "data_plane": moved.data_plane.value,
        "plane_fallback": moved.plane_fallback,
        "kv_bytes": nope + swa,
        "kv_bytes_expected": sizes.kv_bytes,
        "nope_bytes": nope,
        "swa_bytes": swa,
        "payload_bytes": timeline.payload_bytes,
        "held_bytes": timeline.held_bytes,
        "wire_bytes": moved.wire_bytes,
        "socket_bytes": measured.socket_bytes,
        "objects": moved.objects,
        **({} if pushed is None else _rates(pushed)),
        "prefill_simulated": True,
        "prefill_over_transfer": PREFILL_OVER_TRANSFER,
        "prefill_asked_s": measured.prefill_asked_s,
        "prefill_s": timeline.zero_s - timeline.start_s,
        "payload_bytes_after_zero": timeline.payload_bytes_after_zero,
        "hidden_fraction": timeline.hidden_fraction,
        "exposed_handover_s": timeline.exposed_handover_s,
        **({} if pushed is None else {"exposed_bound_s": _exposed_bound_s(measured, pushed)}),
        "phases": _phases(measured),
        "source_peak_over_kv_bytes": measured.growth_bytes,
        "target_peak_over_kv_bytes": (
            ended.growth_bytes - ended.planes_bytes if ended.HasField("growth_bytes") else None
        ),
        "rows_compared": ended.rows_compared,
        "rows_equal": ended.rows_equal,
        "installed_equal": 0 < ended.rows_compared == ended.rows_equal,
    }


def _rates(pushed: Pushed) -> dict[str, Any]:
    middle = pushed.median
    over_tls = [one.tls.seconds / one.sealed.seconds for one in pushed.rounds]
    return {
        "push_rounds": len(pushed.rounds),
        "push_s": middle(lambda one: one.sealed.seconds),
        "push_gbytes_per_s": pushed.sealed_bytes_per_s / _GIGA,
        "tls_baseline_s": middle(lambda one: one.tls.seconds),
        "tls_baseline_gbytes_per_s": middle(lambda one: one.tls.bytes_per_s) / _GIGA,
        "push_over_tls": statistics.median(over_tls),
        "push_over_tls_least": min(over_tls),
        "push_over_tls_most": max(over_tls),
        "tcp_baseline_s": middle(lambda one: one.tcp.seconds),
        "tcp_baseline_gbytes_per_s": middle(lambda one: one.tcp.bytes_per_s) / _GIGA,
        "push_over_tcp": middle(lambda one: one.tcp.seconds / one.sealed.seconds),
        **_cpu(pushed, lambda one: one.sealed),
        **_cpu(pushed, lambda one: one.tls, "tls_"),
        "push_cpu_over_tls": middle(_cpu_over_tls(lambda one: one.sealed)),
        "sealing_push_s": middle(lambda one: one.sealing.seconds),
        "sealing_push_over_tls": middle(lambda one: one.sealing.bytes_per_s / one.tls.bytes_per_s),
        **_cpu(pushed, lambda one: one.sealing, "sealing_"),
        "sealing_cpu_over_tls": middle(_cpu_over_tls(lambda one: one.sealing)),
        "round_trip_s": pushed.rtt_s,
    }


def _cpu_over_tls(cost: Callable[[Round], Cost]) -> Callable[[Round], float]:
    return lambda one: cost(one).cpu_s_per_byte / one.tls.cpu_s_per_byte


def _cpu(pushed: Pushed, cost: Callable[[Round], Cost], prefix: str = "") -> dict[str, float]:
    def per_gbyte(seconds: Callable[[Cost], float]) -> float:
        return pushed.median(lambda one: seconds(cost(one)) / cost(one).payload_bytes) * _GIGA

    return {
        f"{prefix}source_cpu_s_per_gbyte": per_gbyte(lambda one: one.source_cpu_s),
        f"{prefix}target_cpu_s_per_gbyte": per_gbyte(lambda one: one.target_cpu_s),
    }


def _phases(measured: Measured) -> dict[str, float]:
    timeline = measured.moved.timeline
    zero, target = timeline.zero_s, timeline.target
    return {
        "boundary_s": timeline.boundary_s - zero,
        "pushed_s": timeline.pushed_s - zero,
        "sealed_s": timeline.sealed_s - zero,
        "committed_s": timeline.committed_s - zero,
        "target_probe_s": target.probe_s,
        "target_durable_s": target.durable_s,
        "target_transfer_s": target.transfer_s,
        "target_swap_s": target.swap_s,
    }


def exposed_tail_bytes(order: BenchOrder) -> int:
    """K/V bytes that no overlap can hide: one prefill call's rows; live, one window set besides."""
    token_bytes = sum(order.layout.row_bytes(i) for i in range(len(order.layout.layers)))
    call_bytes = token_bytes * min(_PREFILL_CALL_TOKENS, order.position)
    return call_bytes + (window_bytes(order.layout) if order.kind is Kind.SESSION else 0)


def _exposed_bound_s(measured: Measured, pushed: Pushed) -> float:
    timeline = measured.moved.timeline
    tail_s = exposed_tail_bytes(measured.order) / pushed.sealed_bytes_per_s
    commit_s = timeline.committed_s - timeline.sealed_s
    return _TAIL_FACTOR * tail_s + commit_s + _ALLOWED_S + pushed.rtt_s


def as_page(values: dict[str, Any]) -> str:
    """The values for people: a line each, bytes with separators, seconds with their digits."""
    lines = [f"{name:<28} {_shown(value)}" for name, value in values.items() if name != "phases"]
    lines += [f"  {name:<26} {_shown(value)}" for name, value in values["phases"].items()]
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no"}.get(bool(value), "") if value is not None else "unknown"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
