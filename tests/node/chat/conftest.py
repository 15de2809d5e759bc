"""Models of the text tests: the trained one, the tiny one, and the trained one's variants."""

from __future__ import annotations

import functools

import chat_support
import pytest

import engine
from node.chat.render import Renderer


@pytest.fixture(scope="session")
def trained():
    """The repository's trained model."""
    return engine.load_model(chat_support.TRAINED)


@pytest.fixture(scope="session")
def tiny(model_dir):
    """A tiny model: one token for each byte."""
    return engine.load_model(model_dir)


@pytest.fixture(scope="session")
def variant(trained):
    """The trained model with another template, loaded once each."""
    return functools.cache(
        lambda template: chat_support.with_template(trained, chat_support.TRAINED, template)
    )


@pytest.fixture(scope="session")
def renderer(trained):
    """Writes in the trained model's form."""
    return Renderer(trained)
