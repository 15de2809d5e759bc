"""Every vector, by what it is about."""

from __future__ import annotations

from tests.vector_kit.cases import (
    bundle,
    chunk,
    codec,
    draft,
    gate,
    good,
    header,
    model,
    scan,
    signature,
)
from tests.vector_kit.vector import Vector

VECTORS: list[Vector] = [
    vector
    for group in (good, header, scan, model, gate, draft, chunk, codec, bundle, signature)
    for vector in group.VECTORS
]
