"""The demo, as a person and as a program run it, and everything it must refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from e2e_support import (
    ROOT,
    at_once,
    bound,
    command,
    environment,
    failed_cleanly,
    our_processes,
    wait_until_gone,
)

BAD_INPUT_S = 10.0


def test_the_demo_holds_every_promise_and_says_so_in_json(tmp_path):
    out = tmp_path / "out"
    options = ("--tiny", "--json", "--tokens", "1100", "--out", str(out))
    ran = command("node", "demo", *options, seconds=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    said = json.loads(ran.stdout)
    assert said["ok"] is True and said["failed"] == []
    assert said["prompt_tokens"] == 1100 and said["window_tokens"] == 64
    assert said["source_pid"] != said["target_pid"]
    assert said["ring_wraps"] >= 5
    # By hand: 2 full layers of 1,099 rows and 6 windows of 64, 2 heads x (32 + 32) x 2 bytes.
    row = 2 * (32 + 32) * 2
    assert said["bytes"]["nope"] == 2 * 1099 * row
    assert said["bytes"]["swa"] == 6 * 64 * row
    assert said["bytes"]["token_ids"] == 4 * 1099
    assert said["bytes"]["wire_total"] <= 1.05 * said["bytes"]["payload"]
    assert said["replay"]["bitwise_equal_steps"] == said["replay"]["steps"] >= 64
    assert 0.5 < said["hidden_fraction"] < 1
    assert said["prefill_s"] > 0 and said["exposed_handover_s"] > 0
    assert said["pack"]["verify"] == "ok"
    assert said["tamper"] == {"refused": True, "reason": "not_authentic", "exit_code": 11}
    assert sorted(path.name for path in out.iterdir()) == ["session.kvpack", "tenant.key"]
    verified = command("kvpack", "verify", "--key", said["pack"]["key"], said["pack"]["path"])
    assert verified.returncode == 0 and "OK" in verified.stdout


def test_the_demo_of_the_trained_model_shows_the_text_on_both_sides_of_the_move(tmp_path):
    options = ("--json", "--tokens", "400", "--out", str(tmp_path / "out"))
    ran = command("node", "demo", *options, seconds=bound(60))
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["ok"] is True and said["failed"] == []
    assert said["model"] == "muse-novels-6m" and said["window_tokens"] == 256
    # By hand: 3 full layers of 399 rows and 9 windows of 256, 2 heads x (64 + 64) x 2 bytes.
    row = 2 * (64 + 64) * 2
    assert said["bytes"]["nope"] == 3 * 399 * row
    assert said["bytes"]["swa"] == 9 * 256 * row
    assert said["replay"] == {"steps": 65, "bitwise_equal_steps": 65}
    before, after = said["text_before"], said["text_after"]
    story = (ROOT / "examples" / "prompt.txt").read_text("utf-8")
    assert len(before) == 160 and story.count(before) == 1
    # English of a model this small: words that are mostly common ones.
    words = after.lower().split()
    common = {"the", "a", "of", "and", "to", "in", "it", "was", "i", "he", "that", "not", "be"}
    assert 100 <= len(after) <= 160 and len(common & set(words)) >= 2
    assert "\N{REPLACEMENT CHARACTER}" not in before + after


@pytest.mark.slow
def test_the_demo_may_be_run_again_into_the_same_folder(tmp_path):
    for _ in range(2):
        ran = command("node", "demo", "--tiny", "--out", "out", seconds=120, cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")


def test_the_demo_prints_a_table_of_another_text_and_window(tmp_path):
    text = tmp_path / "mein text.txt"
    text.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 20)
    options = ("--out", "out", "--tokens", "300", "--window", "96", "--text", str(text))
    ran = command("node", "demo", *options, seconds=120, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert "65 of 65" in ran.stdout and "window 96" in ran.stdout
    assert "mein text.txt" in ran.stdout and "left" in ran.stdout
    assert "not_authentic" in ran.stdout
    assert "text before the move" in ran.stdout and "\x1b" not in ran.stdout


def _bad_texts(folder):
    (folder / "binary").write_bytes(bytes(range(256)) * 16)
    (folder / "nul").write_bytes(b"text with a NUL \0 " * 200)
    (folder / "short").write_text("x" * 63)
    (folder / "empty").write_text("")
    os.mkfifo(folder / "folder.fifo")
    return {
        "missing": "No such file",
        "binary": "not UTF-8 text",
        "nul": "NUL bytes",
        "short": "shorter than one window of 256 tokens",
        "empty": "shorter than one window of 256 tokens",
        ".": "directory",
        "folder.fifo": "regular",
    }


def test_texts_that_cannot_be_used_give_one_line_within_ten_seconds(tmp_path):
    for name, expected in _bad_texts(tmp_path).items():
        ran = at_once("demo", "--text", str(tmp_path / name), cwd=tmp_path)
        assert expected in failed_cleanly(ran, 2)
    start = time.monotonic()
    ran = command("node", "demo", "--text", str(tmp_path / "nul"), cwd=tmp_path)
    assert time.monotonic() - start < bound(BAD_INPUT_S)
    assert "NUL bytes" in failed_cleanly(ran, 2)
    assert not (tmp_path / "demo-out").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--tokens", "255"), "at least one window of 256"),
        (("--tiny", "--tokens", "63"), "at least one window of 64"),
        (("--tiny", "--model", "."), "not together"),
        (("--window", "0"), "window"),
        (("--source", "nonsense"), "HOST:PORT"),
    ],
)
def test_options_that_cannot_be_used_give_one_line(tmp_path, options, expected):
    assert expected in failed_cleanly(at_once("demo", *options, cwd=tmp_path), 2)


def test_a_model_folder_without_tokenizer_gives_one_line_within_ten_seconds(tmp_path, model_dir):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model_dir.iterdir():
        if "tokenizer" not in path.name:
            (broken / path.name).write_bytes(path.read_bytes())
    start = time.monotonic()
    ran = command("node", "demo", "--model", str(broken), cwd=tmp_path)
    assert time.monotonic() - start < bound(BAD_INPUT_S)
    assert "tokenizer" in failed_cleanly(ran)
    assert not (tmp_path / "demo-out").exists()


def test_an_incomplete_model_folder_is_refused_before_anything_heavy_is_imported(
    tmp_path, model_dir
):
    files = ("config.json", "model.safetensors", "tokenizer.json")
    for missing in files:
        broken = tmp_path / missing
        broken.mkdir()
        for path in model_dir.iterdir():
            if path.name != missing:
                (broken / path.name).write_bytes(path.read_bytes())
    code = (
        "import sys\n"
        "from engine.errors import ModelFolderError\n"
        "from node.shipped import require_model\n"
        "from pathlib import Path\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n        require_model(Path(folder))\n"
        "    except ModelFolderError as error:\n        print(error)\n"
        "print(sorted({'mlx', 'mlx_lm', 'transformers', 'grpc'} & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *(str(tmp_path / missing) for missing in files)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *refusals, imported = ran.stdout.splitlines()
    assert imported == "[]"
    for missing, refusal in zip(files, refusals, strict=True):
        assert missing.split(".")[0] in refusal


def test_a_port_in_use_gives_one_line_within_ten_seconds(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        start = time.monotonic()
        ran = command("node", "demo", "--target", address, cwd=tmp_path)
        assert time.monotonic() - start < bound(BAD_INPUT_S)
        assert address in failed_cleanly(ran)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_an_interrupted_demo_leaves_no_process(tmp_path, number):
    before = our_processes()
    demo = subprocess.Popen(
        [sys.executable, "-m", "node", "demo", "--tiny", "--out", str(tmp_path / "out")],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + bound(20)
    while len(our_processes() - before) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    children = our_processes() - before - {demo.pid}
    assert len(children) == 2
    time.sleep(1.0)
    demo.send_signal(number)
    _, stderr = demo.communicate(timeout=bound(20))
    assert wait_until_gone(children, bound(10))
    if number is not signal.SIGKILL:
        assert demo.returncode == 130
        assert stderr == "kvnode: error: interrupted\n"
        assert not (tmp_path / "out" / "work").exists()


def test_help_of_every_command_works_and_is_short_of_heavy_imports():
    for arguments in (
        (),
        ("serve",),
        ("model", "tiny"),
        ("enroll",),
        ("pair",),
        ("pair", "join"),
        ("demo",),
    ):
        ran = at_once(*arguments, "--help")
        assert ran.returncode == 0 and "Usage:" in ran.stdout
    ran = command("node", "--help")
    assert ran.returncode == 0 and "Usage:" in ran.stdout
    code = "import node.cli, sys; sys.exit('mlx' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
