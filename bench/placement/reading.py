"""How long it takes to read what all nodes say of themselves, from a real directory."""

from __future__ import annotations

import time
from typing import Any

from node.directory import Directory
from node.placement.publishing import Publisher, read_fleet
from node.placement.values import Kind, NodeState


async def read_all(directory: Directory, nodes: int) -> dict[str, Any]:
    """Write ``nodes`` notices and read them as one decision does."""
    names = [f"bench{i:04}" for i in range(nodes)]
    publishers = []
    begun = time.perf_counter()
    for name in names:
        state = NodeState(name, Kind(b"m" * 32, b"n" * 32), 1 << 36, 1 << 35, address="host:7411")
        publisher = Publisher(directory, lambda state=state: state, 15.0)  # type: ignore[misc]
        await directory.register(name, b"i" * 16, 60.0)
        await publisher.publish()
        publishers.append(publisher)
    written_s = time.perf_counter() - begun
    begun = time.perf_counter()
    found = await read_fleet(directory, names)
    read_s = time.perf_counter() - begun
    for publisher in publishers:
        await publisher.close()
    return {
        "nodes": len(found),
        "reads": 3 * nodes,
        "read_all_s": read_s,
        "written_each_ms": 1e3 * written_s / nodes,
    }
