"""Real commands in real processes."""

from __future__ import annotations

import pytest

from node.config import prepare_process

# gRPC reads its environment when it is imported.
prepare_process()

import e2e_support  # noqa: E402

from tests.small_model import make_small_model  # noqa: E402


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model folder, as the command makes it but narrower."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_small_model(folder, "muse_glimmer", seed=2, window=64, layers=8)


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch):
    """No command of a test leaves a process of ours behind."""
    name, _, value = e2e_support.MARK.partition("=")
    monkeypatch.setenv(name, value)
    yield
    assert e2e_support.our_processes() == set()
