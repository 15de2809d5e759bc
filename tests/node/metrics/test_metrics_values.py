"""Counters as plain values, and what a scrape makes of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import page_scene as scene
import pytest
from metrics_support import DEPLOY, promtool, samples

from kvpack.layout import CacheLayout, Encoding, LayerKind, LayerLayout, RopeLayout
from node.metrics.histogram import Histogram
from node.metrics.memory import MemoryShape
from node.metrics.recorder import LABELS_MAX, Recorder
from node.metrics.registry import NodeMetrics
from node.metrics.views import Direction, EndedMove


def scraped(status=None, recorder=None) -> str:
    status = status or scene.status()
    return NodeMetrics(lambda: status, recorder or scene.recorder()).exposition().decode()


def test_promtool_finds_nothing_to_say_about_a_busy_node():
    done = promtool("check", "metrics", given=scraped().encode())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_promtool_accepts_rules_and_configuration():
    folder = DEPLOY / "prometheus"
    assert promtool("check", "rules", str(folder / "kvpack.rules.yml")).returncode == 0
    assert promtool("check", "config", str(folder / "prometheus.yml")).returncode == 0


def test_alerts_ring_when_they_should_and_else_not():
    done = promtool("test", "rules", str(Path(__file__).with_name("alerts.yml")))
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_prompt_tokens_by_source_are_the_prompt_tokens():
    found = samples(scraped())
    by_source = {name: n for name, n in found.items() if name.startswith("kvpack_prompt_tokens_")}
    assert sum(by_source.values()) == scene.counts().prompt_tokens
    assert by_source['kvpack_prompt_tokens_total{source="computed"}'] == 23_318


def test_hits_are_never_more_than_lookups_and_leave_continuations_out():
    found = samples(scraped())
    hits = sum(n for name, n in found.items() if name.startswith("kvpack_cache_hits_total"))
    assert 0 < hits == 44 + 12 <= found["kvpack_cache_lookups_total"]


def test_no_name_of_a_session_or_a_peer_is_scraped():
    text = scraped()
    names = [one.session_id for one in scene.status().sessions]
    names += [one.session_id for one in scene.recorder().last_moves] + ["laptop", "cuda-box"]
    assert [name for name in names if name in text] == []


def test_rows_are_counted_once_where_a_slot_works_in_a_session():
    shape, found = scene.MEMORY, samples(scraped())
    # The slot at 24,310 tokens works in the session that stands there, too.
    lengths = (24_310, 9_472, 3_904, 5_120, 1_800, 2_112)
    assert found['kvpack_kv_bytes{layers="full"}'] == sum(lengths) * shape.full_row_bytes
    assert found['kvpack_kv_bytes{layers="window"}'] == sum(min(n, 2048) for n in lengths) * 39_936


def test_a_node_that_loads_can_be_scraped():
    loading = dataclasses.replace(scene.status(), model="", memory=None, lease=None, sessions=())
    assert "kvpack_kv_bytes" not in scraped(loading)
    assert promtool("check", "metrics", given=scraped(loading).encode()).returncode == 0


def test_a_histogram_counts_below_bounds_and_knows_no_negative_time():
    histogram = Histogram((0.5, 1.0))
    for seconds in (0.2, 0.5, 0.7, 9.0, -3.0, math.nan):
        histogram.add(seconds)
    assert histogram.buckets() == [("0.5", 4.0), ("1.0", 5.0), ("+Inf", 6.0)]
    assert (histogram.count, histogram.sum) == (6, pytest.approx(10.4))


def test_words_beyond_the_bound_are_counted_together():
    recorder = Recorder()
    for number in range(3 * LABELS_MAX):
        recorder.refuse(f"reason_{number}")
    assert len(recorder.refused) == LABELS_MAX + 1
    assert sum(recorder.refused.values()) == 3 * LABELS_MAX


def test_an_ended_move_is_counted_by_its_reason():
    recorder = Recorder()
    for reason, copy in (("", False), ("", True), ("peer_unavailable", False)):
        recorder.move_ended(EndedMove("s", Direction.OUT, "p", copy, reason, 10, 1.0, None, 0.0))
    found = samples(scraped(recorder=recorder))
    row = 'kvpack_moves_total{{direction="out",kind="{}",outcome="{}"}}'.format
    assert found[row("move", "done")] == found[row("copy", "done")] == 1
    assert found[row("move", "peer_unavailable")] == 1
    assert found['kvpack_move_payload_bytes_total{direction="out"}'] == 30


def test_the_shape_of_memory_follows_the_layout():
    rope = RopeLayout(0, 4, interleaved=False)
    layers = (
        LayerLayout(LayerKind.SWA, 16, 2, 4, 4, rope),
        LayerLayout(LayerKind.SWA, 64, 2, 4, 4, rope),
        LayerLayout(LayerKind.FULL, None, 2, 4, 8),
    )
    layout = CacheLayout(layers, Encoding.F16LE, 1024)
    shape = MemoryShape.of(layout)
    assert shape == MemoryShape(((16, 32), (64, 32)), 2, 48, 1, True, 1024)
    for position in (0, 1, 16, 17, 64, 65, 1024):
        assert shape.ring_bytes(position) == layout.state_bytes(LayerKind.SWA, position)
        assert shape.full_bytes(position) == layout.state_bytes(LayerKind.FULL, position)
