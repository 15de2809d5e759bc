"""One Prometheus registry for each node: two nodes in one process do not see each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from node.metrics.families import families
from node.metrics.recorder import Recorder
from node.metrics.views import NodeStatus

#: What every Prometheus reads, also without negotiation.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class NodeMetrics(Collector):
    """What ``/metrics`` answers from.

    Args:
        read: The node's status at this moment. Called on the event loop's thread.
        recorder: Its counters.
    """

    def __init__(self, read: Callable[[], NodeStatus], recorder: Recorder) -> None:
        self._read = read
        self.recorder = recorder
        # Without a first look: a node that still loads has nothing to describe.
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        # Memory, processor time and open files of the process; nothing where there is no /proc.
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """All families, as of now."""
        return families(self._read(), self.recorder)

    def describe(self) -> list[Metric]:
        """Nothing: names are not reserved before the first scrape."""
        return []

    def exposition(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(self.registry)
