"""Parts of the demo and of what ships with the project, as functions."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_support import run

from kvpack.errors import KvpackError
from node.demo import processes
from node.demo.main import DemoOptions, choose_model
from node.demo.seam import SEAM_CHARACTERS, cut_seam, for_terminal
from node.errors import PeerAnswerError, UsageError
from node.shipped import TRAINED, TRAINED_WINDOW_TOKENS, find_shipped, require_model, trained_model

ODD = "\N{REPLACEMENT CHARACTER}"


@given(st.text(min_size=1, max_size=500), st.data())
def test_no_character_is_lost_or_mangled_where_a_move_splits_it(text, data):
    content = text.encode()
    cut = data.draw(st.integers(0, len(content)))
    seam = cut_seam(content[:cut].decode(errors="replace"), content.decode())
    place = len(content[:cut].decode(errors="ignore"))
    before, after = text[:place], text[place : place + SEAM_CHARACTERS]
    if ODD not in text:
        assert seam.before == before[-SEAM_CHARACTERS:]
        assert seam.after == after


def test_a_character_that_is_not_complete_yet_is_left_out():
    assert cut_seam("told ", f"told on caf{ODD}").after == "on caf"
    assert cut_seam(f"{ODD}told", f"{ODD}told on").before == "told"


def test_text_for_a_terminal_is_one_line_that_cannot_steer_it():
    assert for_terminal("a\n\n b\x1b[2J\x07c") == f"a b{ODD}[2J{ODD}c"


def options(**changes) -> DemoOptions:
    given_options = {
        "text": None, "tokens": 2048, "window_tokens": None, "out": Path("out"), "model": None,
        "tiny": False, "source": "127.0.0.1:0", "target": "127.0.0.1:0", "keep": False,
        "as_json": False,
    }  # fmt: skip
    return DemoOptions(**{**given_options, **changes})


def test_the_demo_chooses_what_was_asked_then_the_trained_model_then_a_tiny_one(model_dir):
    trained = trained_model()
    assert trained is not None and trained.name == TRAINED
    config = json.loads((trained / "config.json").read_text())
    assert config["sliding_window"] == TRAINED_WINDOW_TOKENS
    chosen = choose_model(options(), trained)
    assert (chosen.folder, chosen.window_tokens, chosen.note) == (trained, 256, "")
    chosen = choose_model(options(), None)
    assert (chosen.folder, chosen.window_tokens) == (None, 64) and TRAINED in chosen.note
    for changes, window in (({"tiny": True}, 64), ({"window_tokens": 96}, 96)):
        chosen = choose_model(options(**changes), trained)
        assert (chosen.folder, chosen.window_tokens, chosen.note) == (None, window, "")
    assert choose_model(options(model=model_dir), trained).folder == model_dir
    with pytest.raises(UsageError, match="not together"):
        options(model=model_dir, tiny=True)


def test_what_ships_is_found_in_the_package_first_and_beside_it_otherwise(tmp_path):
    package = tmp_path / "node"
    assert find_shipped("prompt.txt", package=package) is None
    beside = tmp_path / "examples"
    inside = package / "assets"
    for folder in (beside, inside):
        folder.mkdir(parents=True)
        (folder / "prompt.txt").write_text("x")
        assert find_shipped("prompt.txt", package=package) == folder / "prompt.txt"


def test_a_node_without_any_model_says_how_to_give_one(monkeypatch):
    monkeypatch.setattr("node.shipped.trained_model", lambda: None)
    with pytest.raises(UsageError, match="--model"):
        require_model(None)
    with pytest.raises(KvpackError, match="not a folder"):
        require_model(Path("no-such-model"))


def test_a_node_gives_the_text_of_tokens_and_refuses_ids_outside_the_vocabulary(world):
    async def work():
        async with world.node("source") as (_, client):
            text = "Zwölf Boxkämpfer"
            token_ids = await client.tokenize(text)
            assert await client.detokenize(token_ids) == text
            assert await client.detokenize([]) == ""
            with pytest.raises(PeerAnswerError) as refused:
                await client.detokenize([5, 1 << 31])
            assert refused.value.peer_reason == "over_limit"

    run(work())


#: A child that announces nothing, and takes its time to end.
SLUGGISH = """
import signal, sys, time
def end(*_):
    time.sleep(0.5)
    sys.exit()
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_a_child_is_waited_for_also_where_its_starter_is_cancelled_twice(tmp_path, monkeypatch):
    """As with two nodes that both start too late: the end of one cancels the other's clean-up."""
    ready, made = tmp_path / "ready", []
    child = [sys.executable, "-c", SLUGGISH, str(ready)]
    monkeypatch.setattr(processes, "_command", lambda *_: child)
    plain = asyncio.create_subprocess_exec

    async def starting(*arguments, **options):
        made.append(await plain(*arguments, **options))
        return made[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)

    async def serve():
        async with processes.serving([], tmp_path / "log"):
            raise AssertionError("it announced itself")

    async def work():
        task = asyncio.create_task(serve())
        while not ready.exists():
            await asyncio.sleep(0.01)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await task
        return made[0].returncode

    assert run(work()) == 0


def test_a_node_that_starts_too_late_is_said_where_it_speaks(tmp_path, monkeypatch):
    child = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(processes, "_command", lambda *_: child)
    monkeypatch.setattr(processes, "START_S", 0.2)

    async def work():
        async with processes.serving([], tmp_path / "log"):
            raise AssertionError("it announced itself")

    with pytest.raises(processes.ChildError, match=r"did not start in 0 s: it said nothing; is "):
        run(work())
