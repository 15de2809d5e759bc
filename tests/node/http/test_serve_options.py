"""``kvnode serve``: its options, alone and against each other."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import TRAINED, ask, served

from node import cli_serve
from node.cli import main
from node.config import Address, default_data_dir
from node.errors import UsageError
from node.serving.options import AnswerDefaults, ContextPolicy, PrefillAt


@pytest.fixture(autouse=True)
def level_of_grpcs_log(monkeypatch):
    """The command, run in this process, lets gRPC speak: processes of later tests would, too."""
    monkeypatch.setenv("GRPC_VERBOSITY", os.environ.get("GRPC_VERBOSITY", "NONE"))


def config(monkeypatch, *arguments: str):
    """What a command line would serve."""
    found = []

    def run(config, **_):
        found.append(config)

    monkeypatch.setattr("node.daemon.serve", run)
    done = CliRunner().invoke(main, ["serve", "--model", str(TRAINED), *arguments])
    assert done.exit_code == 0, done.output
    return found[0]


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["serve", "--model", str(TRAINED), *arguments])
    assert done.exit_code == 2, done.output
    return done.output


def test_a_model_alone_is_served_over_http_as_mlx_lm_server_does(monkeypatch):
    plain = config(monkeypatch)
    assert plain.http.address == Address("127.0.0.1", 8080)
    assert (plain.address, plain.credentials_dir) == (None, None)
    assert plain.data_dir == default_data_dir(TRAINED)
    assert plain.directory_url == f"sqlite:{plain.data_dir / 'directory.sqlite'}"
    assert plain.serving.answer == AnswerDefaults(512, 0.0, 1.0, 0, 0.0)
    assert plain.serving.context_policy is ContextPolicy.SHIFT
    assert plain.http.allowed_origins == ()


def test_options_of_mlx_lm_server_mean_what_they_mean_there(monkeypatch, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    given = config(
        monkeypatch, "--host", "localhost", "--port", "9000", "--temp", "0.7", "--top-p", "0.9",
        "--top-k", "40", "--min-p", "0.05", "--max-tokens", "99", "--prompt-cache-bytes", "2GB",
        "--allowed-origins", "http://a.example, http://b.example", "--log-level", "WARNING",
        "--chat-template", str(tmp_path / "chat.jinja"), "--prompt-cache-size", "10",
        "--prefill-step-size", "512", "--data-dir", str(tmp_path / "d"),
    )  # fmt: skip
    assert given.http.address == Address("localhost", 9000)
    assert given.serving.answer == AnswerDefaults(99, 0.7, 0.9, 40, 0.05)
    assert given.serving.cache_bytes == 2_000_000_000
    assert given.http.allowed_origins == ("http://a.example", "http://b.example")
    assert given.serving.chat_template == "{{ messages }}"
    assert config(monkeypatch, "--chat-template", "{{ x }}").serving.chat_template == "{{ x }}"


def test_options_of_mlx_lm_server_that_change_no_answer_are_taken_and_said_so(monkeypatch):
    monkeypatch.setattr("node.daemon.serve", lambda config, **_: None)
    given = ("--draft-model", "x", "--num-draft-tokens", "3", "--trust-remote-code")
    done = CliRunner().invoke(main, ["serve", "--model", str(TRAINED), *given])
    assert done.exit_code == 0, done.output
    for name in ("--draft-model", "--num-draft-tokens", "--trust-remote-code"):
        assert f"{name} changes nothing here" in done.stderr


def test_grpc_alone_has_no_http_port_and_needs_what_it_always_needed(monkeypatch, tmp_path):
    grpc = ["--grpc", "127.0.0.1:0", "--data-dir", str(tmp_path), "--credentials", str(tmp_path)]
    alone = config(monkeypatch, *grpc, "--directory", "sqlite:x")
    assert alone.http is None and alone.address == Address("127.0.0.1", 0)
    both = config(monkeypatch, *grpc, "--directory", "sqlite:x", "--port", "0")
    assert both.http.address == Address("127.0.0.1", 0)
    assert "--directory" in refused(*grpc)
    assert "--data-dir" in refused("--grpc", "127.0.0.1:0")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0"),  # noqa: S104
        (("--tls-key", "x"), "--tls-cert"),
        (("--prefill", "remote"), "--producer"),
        (("--producer", "a@b:1"), "--prefill"),
        (("--slots", "5"), "--slots"),
        (("--cache-bytes", "lots"), "lots"),
        (("--kv-bits", "4"), "--kv-bits"),
        (("--adapter-path", "x"), "mlx_lm.fuse"),
        (("--chat-template-args", "{}"), "chat_template_kwargs"),
        (("--use-default-chat-template",), "--chat-template FILE"),
        (("--pipeline",), "--pipeline"),
        (("--grpc", "127.0.0.1:0", "--data-dir", "x"), "kvnode enroll"),
    ],
)
def test_contradictions_and_options_that_would_change_answers_are_refused(arguments, named):
    assert named in refused(*arguments)


def test_a_default_data_folder_is_the_models_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    first, second = (default_data_dir(Path(place)) for place in ("/a/tiny", "/b/tiny"))
    assert first != second and first.name.startswith("tiny-")
    assert default_data_dir(Path("/a/x/../tiny")) == first
    with pytest.raises(UsageError):
        cli_serve.serve_config({"address": "nowhere"}, Path())
    assert PrefillAt("remote") is PrefillAt.REMOTE


def test_a_start_of_a_tiny_node_costs_little_more_than_its_imports(tmp_path, model_dir):
    """By processor time, as many times what a few of them take on this machine: 6 to 7."""

    def spent_s() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    code = "import cryptography, grpc, numpy"
    measures = [spent_s()]
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        measures.append(spent_s())
    imports_s = max(after - before for before, after in itertools.pairwise(measures))
    with served(tmp_path / "data", model=model_dir) as node:
        assert ask(f"{node.base_url}/health")[0] == 200
    assert spent_s() - measures[-1] < 12 * imports_s
