"""Where MLX computes can be said, and a fingerprint tells a GPU's build from a processor's."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from engine_support import ModelCase

from engine import BackendError, Model, backend, fingerprint

Load = Callable[[ModelCase], Model]
no_gpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="there is a GPU")


@no_gpu
def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    backend.use_device("cpu")
    assert backend.backend_name() == "cpu"
    with pytest.raises(BackendError, match="device gpu"):
        backend.use_device("gpu")
    with pytest.raises(ValueError, match="'tpu'"):
        backend.use_device("tpu")
    assert backend.backend_name() == "cpu"


@no_gpu
def test_the_fingerprint_tells_a_build_for_gpus_from_one_for_processors(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the processor both name the same device, and they bring different libraries."""
    model = load(ModelCase())
    own = fingerprint.numerics_of(model.layout, model.plane_layout)
    assert own == model.numerics()
    monkeypatch.setattr(backend, "_has_gpu", lambda: True)
    other = fingerprint.numerics_of(model.layout, model.plane_layout)
    assert set(other.values) - set(own.values) == {("build", "gpu")}
