"""Tiny model folders and loaded models, shared by the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import ModelCase, write_model

import engine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelCase], Path]:
    """Folder of a tiny model, written once per case."""
    folders: dict[ModelCase, Path] = {}

    def folder_of(case: ModelCase) -> Path:
        key = case.without_layout()
        if key not in folders:
            folders[key] = write_model(tmp_path_factory.mktemp("models") / case.label, key)
        return folders[key]

    return folder_of


@pytest.fixture(scope="session")
def load(model_folder: Callable[[ModelCase], Path]) -> Callable[[ModelCase], engine.Model]:
    """A loaded tiny model, once per case."""
    models: dict[ModelCase, engine.Model] = {}

    def load_case(case: ModelCase) -> engine.Model:
        if case not in models:
            models[case] = engine.load_model(model_folder(case), plane_layout=case.layout)
        return models[case]

    return load_case
