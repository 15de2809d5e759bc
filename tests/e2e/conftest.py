"""Real commands in real processes."""

from __future__ import annotations

import pytest

from node.config import prepare_process

# gRPC reads its environment when it is imported.
prepare_process()

import e2e_support  # noqa: E402


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A tiny model folder, made by the command."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    made = e2e_support.command(
        "node", "model", "tiny", "--arch", "muse_glimmer", "--out", str(folder), "--seed", "2"
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch):
    """No command of a test leaves a process of ours behind."""
    name, _, value = e2e_support.MARK.partition("=")
    monkeypatch.setenv(name, value)
    yield
    assert e2e_support.our_processes() == set()
